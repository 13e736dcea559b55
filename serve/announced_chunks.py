# SPDX-License-Identifier: Apache-2.0
"""Chunks whose bytes the ranks fetch themselves, by a transport with its own route."""

import asyncio
from typing import Any

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.backend import Backend
from vllm_fp8ext.serve.stage_arguments import stage_arguments
from vllm_fp8ext.serve.work import keep_running, outcome
from vllm_fp8ext.update.contract.operations import Operation
from vllm_fp8ext.update.contract.results import Result, UpdateState
from vllm_fp8ext.update.transports.transport import Announcement, Route


class AnnouncedChunk:
    """One chunk that a client has announced. `body`: fields of its route's body, nested ones plain."""

    def __init__(self, backend: Backend, id: str, body: dict[str, Any]) -> None:
        self._backend = backend
        self._id = id
        self._body = body

    async def stage(self, route: Route) -> UpdateState:
        """Have the ranks fetch the chunk, and wait for them."""
        chunk = await self._announcement(route)
        state: UpdateState = await self._backend.engine.job(Operation.STAGE, **self._arguments(chunk))
        return state

    async def begin_to_stage(self, route: Route) -> UpdateState:
        """Have the ranks fetch the chunk; the update tells what becomes of it."""
        chunk = await self._announcement(route)
        started = await self._backend.engine(Operation.STAGE, **self._arguments(chunk), group=chunk.group)
        keep_running(poll_to_end(self._backend, started))
        state: UpdateState = await self._backend.engine(Operation.UPDATE, id=self._id)
        return state

    async def _announcement(self, route: Route) -> Announcement:
        return await asyncio.to_thread(route.announce, self._body, self._backend.limits)

    def _arguments(self, chunk: Announcement) -> dict[str, Any]:
        size = sum(tensor.size for tensor in chunk.tensors)
        return stage_arguments(self._id, str(self._body["n"]), chunk.source, chunk.tensors, size)


async def poll_to_end(backend: Backend, started: Result) -> None:
    """Poll a job to its end however long it takes: the ranks give up by themselves what does not come."""
    while True:
        result = await outcome(backend.engine.wait_for_job(Operation.STAGE, started))
        if not isinstance(result, UpdateError) or result.kind != "engine-timeout":
            return
