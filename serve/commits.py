# SPDX-License-Identifier: Apache-2.0
"""Calls that change which weights are served: commit, rollback, and a whole update from the server's disk."""

import asyncio
import secrets

from vllm_fp8ext.serve import schema
from vllm_fp8ext.serve.backend import Backend
from vllm_fp8ext.serve.checkpoint_reading import read_checkpoint
from vllm_fp8ext.serve.work import outcome
from vllm_fp8ext.update.contract.operations import Operation
from vllm_fp8ext.update.contract.results import RolledBack, UpdateState


def commit_once(backend: Backend, id: str) -> asyncio.Future[UpdateState]:
    """Return the commit of an update that is under way, or begin one.

    A client whose connection was lost asks again: a commit of its own would begin to wait for running requests anew when the
    first has given up.
    """
    if id not in backend.commits:
        backend.commits[id] = asyncio.ensure_future(commit(backend, id))
        backend.commits[id].add_done_callback(lambda _: backend.commits.pop(id))
    return backend.commits[id]


async def commit(backend: Backend, id: str) -> UpdateState:
    """Serve the weights of an update."""
    async with backend.status_refreshed():
        caller = secrets.token_hex(8)  # another process may commit it as well: both get the outcome
        state: UpdateState = await backend.engine.call_until_drained(Operation.COMMIT, id=id, caller=caller)
        return state


async def rollback(backend: Backend, body: schema.Rollback) -> RolledBack:
    """Serve the previous weights again."""
    async with backend.status_refreshed():
        result: RolledBack = await backend.engine.call_until_drained(Operation.ROLLBACK, **dict(body))
        return result


async def load(backend: Backend, body: schema.Load, *, through_pause: bool = False) -> UpdateState:
    """Open an update, read a checkpoint on the server's disk, and commit it; abandon it if that fails.

    `through_pause`: it is committed while somebody has paused the engine, which stays paused.
    """
    place = await asyncio.to_thread(backend.allowed_dirs.resolve, body.path)
    options = {key: value for key, value in body if key != "path"}
    opened: UpdateState = await backend.engine(Operation.OPEN, **options, through_pause=through_pause)
    try:
        await read_checkpoint(backend, opened.id, place)
        return await commit(backend, opened.id)
    except BaseException:
        await outcome(backend.abandon(opened.id))
        raise
