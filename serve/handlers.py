# SPDX-License-Identifier: Apache-2.0
"""Endpoints: HTTP on one side, the update engine on the other, nothing in between."""

import asyncio
from typing import Annotated, Any

from fastapi import Query, Request, Response

from vllm_fp8ext.serve import schema
from vllm_fp8ext.serve.announced_chunks import AnnouncedChunk
from vllm_fp8ext.serve.backend import Backend
from vllm_fp8ext.serve.checkpoint_reading import read_checkpoint
from vllm_fp8ext.serve.commits import commit_once, load, rollback
from vllm_fp8ext.serve.uploads import stage_upload
from vllm_fp8ext.serve.work import run_to_end
from vllm_fp8ext.update.contract.fields import ChunkNumber
from vllm_fp8ext.update.contract.operations import Operation
from vllm_fp8ext.update.contract.results import EngineStatus, Stale, UpdateState
from vllm_fp8ext.update.transports.transport import Route

Rank = Annotated[int | None, Query(ge=0, le=2**31 - 1, description="What this rank serves alone.")]


class Handlers:
    """The endpoints of one backend. What may change weights runs to its end, also when its client has gone."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def weights(self) -> Any:
        status: EngineStatus = await self._backend.engine(Operation.STATUS)
        return status.as_dict() | {"features": self._backend.features}

    async def manifest(self, rank: Rank = None) -> Any:
        backend = self._backend
        body = await (backend.manifest_body() if rank is None else backend.rank_manifest_body(rank))
        return Response(body, media_type="application/json")

    async def kv_scales(self) -> Any:
        return await self._backend.engine(Operation.KV_SCALES)

    async def digests(self) -> Any:
        return await self._fresh(Operation.DIGESTS)

    async def verify(self) -> Any:
        return await self._fresh(Operation.VERIFY)

    async def declare_current(self, body: schema.Current) -> Any:
        return await run_to_end(self._declare_current(body))

    async def _declare_current(self, body: schema.Current) -> dict[str, Any]:
        async with self._backend.status_refreshed():
            status: EngineStatus = await self._backend.engine.call_until_drained(
                Operation.DECLARE_CURRENT, **dict(body)
            )
        return status.as_dict() | {"features": self._backend.features}

    async def _fresh(self, operation: Operation) -> Any:
        """Repeat a job whose result is of weights that are not served any more."""
        while True:
            result = await self._backend.engine.job(operation)
            if not isinstance(result, Stale):
                return result

    async def open_update(self, body: schema.OpenUpdate) -> Any:
        backend = self._backend
        opened: UpdateState = await backend.engine.call_until_drained(Operation.OPEN, **dict(body))
        chunk_bytes = opened.max_chunk_bytes or backend.spool.limit
        limits = {"max_chunk_bytes": chunk_bytes, "max_receive_bytes": backend.receive_bytes}
        return opened.as_dict() | limits

    async def get_update(self, id: schema.UpdateId) -> Any:
        return await self._backend.engine(Operation.UPDATE, id=id)

    async def put_chunk(self, id: schema.UpdateId, n: ChunkNumber, request: Request) -> Any:
        return await run_to_end(stage_upload(self._backend, id, str(n), request))

    async def post_files(self, id: schema.UpdateId, body: schema.Files) -> Any:
        return await run_to_end(self._read(id, body.path))

    async def _read(self, id: str, path: str) -> UpdateState:
        place = await asyncio.to_thread(self._backend.allowed_dirs.resolve, path)
        return await read_checkpoint(self._backend, id, place)

    def announced(self, route: Route) -> Any:
        """Return the endpoint of a transport's route."""

        async def announce(id: schema.UpdateId, body: route.body) -> Any:  # type: ignore[name-defined]  # a value that FastAPI reads
            chunk = AnnouncedChunk(self._backend, id, dict(body))
            if route.waits:
                return await run_to_end(chunk.stage(route))
            await self._backend.engine(Operation.CHECK, id=id)
            return await run_to_end(chunk.begin_to_stage(route))

        return announce

    async def prepare(self, id: schema.UpdateId) -> Any:
        return await run_to_end(self._backend.engine.call_until_drained(Operation.PREPARE, id=id))

    async def commit(self, id: schema.UpdateId) -> Any:
        return await run_to_end(commit_once(self._backend, id))

    async def abandon(self, id: schema.UpdateId) -> Any:
        return await self._backend.abandon(id)

    async def rollback(self, body: schema.Rollback | None = None) -> Any:
        return await run_to_end(rollback(self._backend, body or schema.Rollback()))

    async def sleep(self, body: schema.Sleep | None = None) -> Any:
        return await run_to_end(self._fall_asleep(body or schema.Sleep()))

    async def _fall_asleep(self, body: schema.Sleep) -> EngineStatus:
        backend = self._backend
        await backend.engine(Operation.MAY_SLEEP)
        try:
            await backend.engine.sleep(body.level, body.requests)
        except BaseException:
            backend.refresh_status_soon()
            raise
        return await backend.refresh_status()

    async def wake(self, body: schema.Wake | None = None) -> Any:
        tags = (body or schema.Wake()).tags
        return await run_to_end(self._wake_up(list(tags) if tags else None))

    async def _wake_up(self, tags: list[str] | None) -> EngineStatus:
        await self._backend.engine.wake(tags)
        return await self._backend.refresh_status()

    async def load(self, body: schema.Load) -> Any:
        return await run_to_end(load(self._backend, body))
