# SPDX-License-Identifier: Apache-2.0
"""The routes under `/fp8ext/v1`: HTTP on one side, the update engine on the other, nothing in between."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.security import HTTPBearer
from pydantic import Field
from starlette.requests import ClientDisconnect

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve import schema
from vllm_fp8ext.serve.auth import AdminKey
from vllm_fp8ext.serve.backend import Backend
from vllm_fp8ext.serve.checkpoint_reading import read_checkpoint
from vllm_fp8ext.serve.connection import Connection
from vllm_fp8ext.serve.content_digest import ContentDigest
from vllm_fp8ext.serve.problems import RESPONSES, guarded_route
from vllm_fp8ext.serve.spool import Extent
from vllm_fp8ext.serve.stage_arguments import stage_arguments
from vllm_fp8ext.serve.work import finished, kept, outcome
from vllm_fp8ext.update.contract.operations import Operation
from vllm_fp8ext.update.contract.safetensors_header import StoredTensor, read_header
from vllm_fp8ext.update.transports import ipc, nccl
from vllm_fp8ext.update.transports.http.message import UploadSource
from vllm_fp8ext.update.transports.transport import Source, Transport

ChunkNumber = Annotated[int, Field(ge=0, le=65_535)]


def router(key: AdminKey, backend: Backend) -> APIRouter:
    """All routes, behind the admin key."""
    documented = HTTPBearer(auto_error=False, scheme_name="fp8extAdminKey", description="FP8EXT_ADMIN_KEY")
    routes = APIRouter(
        prefix=schema.PREFIX,
        tags=["fp8ext"],
        dependencies=[Depends(documented)],
        responses=RESPONSES,
        route_class=guarded_route(key, backend.metrics.refused, backend.bodies),
    )

    @routes.get("/weights", response_model=schema.Weights, summary="What is served")
    async def weights() -> Any:
        return await backend.engine(Operation.STATUS)

    @routes.get("/weights/manifest", response_model=dict[str, Any], summary="What an update must bring")
    async def manifest() -> Any:
        return await backend.engine(Operation.MANIFEST)

    @routes.get(
        "/weights/kv-scales",
        response_model=schema.KvScalesServed,
        summary="Scales of the FP8 KV cache that is served",
    )
    async def kv_scales() -> Any:
        return await backend.engine(Operation.KV_SCALES)

    @routes.get("/weights/digests", response_model=schema.Digests, summary="Digests of what is served")
    async def digests() -> Any:
        while True:
            found = await backend.engine.job(Operation.DIGESTS)
            if not found.get("stale"):
                return found

    @routes.post(
        "/weights/verify",
        response_model=schema.Verified,
        summary="Compare what is served with what was committed",
    )
    async def verify() -> Any:
        while True:
            found = await backend.engine.job(Operation.VERIFY)
            if not found.get("stale"):
                return found

    @routes.post("/updates", response_model=schema.Update, status_code=201, summary="Open an update")
    async def open_update(body: schema.OpenUpdate) -> Any:
        opened = await backend.engine.patiently(Operation.OPEN, **dict(body))
        limits = {"max_chunk_bytes": backend.spool.limit, "max_receive_bytes": backend.receive_bytes}
        return opened | limits | {"group": backend.group}

    @routes.get("/updates/{id}", response_model=schema.Update, summary="Where an update stands")
    async def get_update(id: schema.UpdateId) -> Any:
        return await backend.engine(Operation.UPDATE, id=id)

    @routes.put(
        "/updates/{id}/chunks/{n}",
        response_model=schema.Update,
        summary="Send tensors as one safetensors body",
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
            }
        },
    )
    async def put_chunk(id: schema.UpdateId, n: ChunkNumber, request: Request) -> Any:
        return await finished(_receive(backend, id, str(n), request))

    @routes.post(
        "/updates/{id}/files", response_model=schema.Update, summary="Read tensors from the server's disk"
    )
    async def post_files(id: schema.UpdateId, body: schema.Files) -> Any:
        return await finished(_read(backend, id, body))

    @routes.post(
        "/updates/{id}/handles",
        response_model=schema.Update,
        summary="Read tensors where they are on a GPU of this machine",
    )
    async def post_handles(id: schema.UpdateId, body: schema.Handles) -> Any:
        return await finished(_announced(backend, id, ipc.TRANSPORT, dict(body)))

    @routes.post(
        "/updates/{id}/receive",
        response_model=schema.Update,
        status_code=202,
        summary="Receive tensors that the client is about to broadcast",
    )
    async def post_receive(id: schema.UpdateId, body: schema.Receive) -> Any:
        await backend.engine(Operation.CHECK, id=id)
        return await finished(_announced(backend, id, nccl.TRANSPORT, dict(body)))

    @routes.post("/updates/{id}/prepare", response_model=schema.Update, summary="Validate the whole update")
    async def prepare(id: schema.UpdateId) -> Any:
        return await finished(backend.engine.patiently(Operation.PREPARE, id=id))

    @routes.post("/updates/{id}/commit", response_model=schema.Update, summary="Serve the new weights")
    async def commit(id: schema.UpdateId) -> Any:
        return await finished(_commit_once(backend, id))

    @routes.delete("/updates/{id}", response_model=schema.Update, summary="Give an update up")
    async def abandon(id: schema.UpdateId) -> Any:
        return await backend.abandon(id)

    @routes.post("/rollback", response_model=schema.Committed, summary="Serve the previous weights again")
    async def rollback(body: schema.Rollback | None = None) -> Any:
        return await finished(_rollback(backend, body or schema.Rollback()))

    @routes.post("/sleep", response_model=schema.Weights, summary="Give the GPU's memory back")
    async def sleep(body: schema.Sleep | None = None) -> Any:
        wanted = body or schema.Sleep()
        return await finished(_asleep(backend, wanted))

    @routes.post("/wake", response_model=schema.Weights, summary="Take the GPU's memory again")
    async def wake(body: schema.Wake | None = None) -> Any:
        tags = (body or schema.Wake()).tags
        return await finished(_awake(backend, list(tags) if tags else None))

    @routes.post("/load", response_model=schema.Update, summary="Update from the server's disk in one call")
    async def load(body: schema.Load) -> Any:
        return await finished(_load(backend, body))

    return routes


async def _asleep(backend: Backend, wanted: schema.Sleep) -> dict[str, Any]:
    await backend.engine(Operation.MAY_SLEEP)
    try:
        await backend.engine.sleep(wanted.level, wanted.requests)
    except BaseException:
        backend.look_soon()
        raise
    return await backend.look()


async def _awake(backend: Backend, tags: list[str] | None) -> dict[str, Any]:
    await backend.engine.wake(tags)
    return await backend.look()


async def _receive(backend: Backend, id: str, chunk: str, request: Request) -> dict[str, Any]:
    async with contextlib.AsyncExitStack() as room:
        async with backend.kept_open(id):
            digest = ContentDigest.parse(request.headers.get("content-digest"))
            extent = await room.enter_async_context(_room(backend, request, digest))
        content = extent.content

        def read(start: int, size: int) -> bytes:
            return bytes(content[start : start + size])

        name, limit = f"chunk {chunk}", backend.bodies.limits.header_bytes
        header = read_header(read, extent.length, name, limit)
        tensors = await backend.bodies.header(header, extent.length, name)
        source = UploadSource(extent.path, extent.offset)
        sha256 = digest.sha256 if digest else None
        return await _stage(backend, id, chunk, source, tensors, extent.length, sha256)


def _room(
    backend: Backend, request: Request, digest: ContentDigest | None
) -> contextlib.AbstractAsyncContextManager[Extent]:
    """Where the body of a request lies, once it has come."""
    length = request.headers.get("content-length")
    if length is not None and not (length.isdecimal() and len(length) < 19):
        raise UpdateError(
            "length-required", f"Content-Length: expected a number, found {length!r:.40}", status=400
        )
    connection = Connection.of(request.scope, request.receive)
    size = int(length) if length else None
    return backend.spool.receive(_body(request), size, digest, connection)


async def _announced(backend: Backend, id: str, transport: Transport, body: dict[str, Any]) -> dict[str, Any]:
    """Have the ranks fetch a chunk that the client has announced. `body`: fields of the route's body."""
    route = transport.route
    assert route is not None
    chunk = await asyncio.to_thread(route.announce, body, backend.limits)
    size = sum(tensor.size for tensor in chunk.tensors)
    if route.waits:
        return await _stage(backend, id, str(body["n"]), chunk.source, chunk.tensors, size)
    arguments = stage_arguments(id, str(body["n"]), chunk.source, chunk.tensors, size)
    started = await backend.engine(Operation.STAGE, **arguments)
    backend.group = chunk.group or backend.group
    kept(_followed(backend, started))
    return await backend.engine(Operation.UPDATE, id=id)


async def _followed(backend: Backend, started: dict[str, Any]) -> None:
    """Poll a job to its end however long it takes: the ranks give a broadcast up by themselves."""
    while True:
        found = await outcome(backend.engine.ended(Operation.STAGE, started))
        if not isinstance(found, UpdateError) or found.kind != "engine-timeout":
            return


async def _stage(
    backend: Backend,
    id: str,
    chunk: str,
    source: Source,
    tensors: Sequence[StoredTensor],
    size: int,
    sha256: str | None = None,
) -> dict[str, Any]:
    told = stage_arguments(id, chunk, source, tensors, size) | {"sha256": sha256}
    return dict((await backend.engine.job(Operation.STAGE, **told))["update"])


def _commit_once(backend: Backend, id: str) -> asyncio.Future[dict[str, Any]]:
    """One that a client asks for again, whose connection was lost, is the one that goes on: by itself it would begin to wait
    for running requests anew when that one has given up."""
    if id not in backend.commits:
        backend.commits[id] = asyncio.ensure_future(_commit(backend, id))
        backend.commits[id].add_done_callback(lambda _: backend.commits.pop(id))
    return backend.commits[id]


async def _commit(backend: Backend, id: str) -> dict[str, Any]:
    async with backend.looked_at():
        return await backend.engine.patiently(Operation.COMMIT, id=id)


async def _rollback(backend: Backend, body: schema.Rollback) -> dict[str, Any]:
    async with backend.looked_at():
        return await backend.engine.patiently(Operation.ROLLBACK, **dict(body))


async def _read(backend: Backend, id: str, body: schema.Files) -> dict[str, Any]:
    place = await asyncio.to_thread(backend.allowed_dirs.resolve, body.path)
    return await read_checkpoint(backend, id, place)


async def _load(backend: Backend, body: schema.Load) -> dict[str, Any]:
    place = await asyncio.to_thread(backend.allowed_dirs.resolve, body.path)
    opened = await backend.engine(Operation.OPEN, **{key: value for key, value in body if key != "path"})
    try:
        await read_checkpoint(backend, opened["id"], place)
        return await _commit(backend, opened["id"])
    except BaseException:
        await outcome(backend.abandon(opened["id"]))
        raise


async def _body(request: Request) -> AsyncIterator[bytes]:
    try:
        async for piece in request.stream():
            yield piece
    except ClientDisconnect:
        raise UpdateError("truncated", "the client went away in the middle of the body", status=400) from None
