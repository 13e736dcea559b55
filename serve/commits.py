# SPDX-License-Identifier: Apache-2.0
"""Calls that change which weights are served: commit, rollback, and a whole update from the server's disk."""

import asyncio
from typing import Any

from vllm_fp8ext.serve import schema
from vllm_fp8ext.serve.backend import Backend
from vllm_fp8ext.serve.checkpoint_reading import read_checkpoint
from vllm_fp8ext.serve.work import outcome
from vllm_fp8ext.update.contract.operations import Operation


def commit_once(backend: Backend, id: str) -> asyncio.Future[dict[str, Any]]:
    """Return the commit of an update that is under way, or begin one.

    A client whose connection was lost asks again: a commit of its own would begin to wait for running requests anew when the
    first has given up.
    """
    if id not in backend.commits:
        backend.commits[id] = asyncio.ensure_future(commit(backend, id))
        backend.commits[id].add_done_callback(lambda _: backend.commits.pop(id))
    return backend.commits[id]


async def commit(backend: Backend, id: str) -> dict[str, Any]:
    """Serve the weights of an update."""
    async with backend.status_refreshed():
        return await backend.engine.call_until_drained(Operation.COMMIT, id=id)


async def rollback(backend: Backend, body: schema.Rollback) -> dict[str, Any]:
    """Serve the previous weights again."""
    async with backend.status_refreshed():
        return await backend.engine.call_until_drained(Operation.ROLLBACK, **dict(body))


async def load(backend: Backend, body: schema.Load) -> dict[str, Any]:
    """Open an update, read a checkpoint on the server's disk, and commit it; abandon it if that fails."""
    place = await asyncio.to_thread(backend.allowed_dirs.resolve, body.path)
    opened = await backend.engine(Operation.OPEN, **{key: value for key, value in body if key != "path"})
    try:
        await read_checkpoint(backend, opened["id"], place)
        return await commit(backend, opened["id"])
    except BaseException:
        await outcome(backend.abandon(opened["id"]))
        raise
