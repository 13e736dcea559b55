# SPDX-License-Identifier: Apache-2.0
"""Chunks that come as the bodies of requests."""

import contextlib
from collections.abc import AsyncIterator

from fastapi import Request
from starlette.requests import ClientDisconnect

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.backend import Backend
from vllm_fp8ext.serve.connection import Connection
from vllm_fp8ext.serve.content_digest import ContentDigest
from vllm_fp8ext.serve.spool import ReceivedBody
from vllm_fp8ext.serve.stage_arguments import stage_arguments
from vllm_fp8ext.update.contract.operations import Operation
from vllm_fp8ext.update.contract.results import UpdateState
from vllm_fp8ext.update.contract.safetensors_header import read_header
from vllm_fp8ext.update.transports.http.message import UploadSource

_LENGTH_DIGITS = 18
"""Digits of the largest length that is looked at; Python refuses to read very long numbers."""


async def stage_upload(backend: Backend, id: str, chunk: str, request: Request) -> UpdateState:
    """Receive the body of a request, and have the ranks stage it.

    Raises:
        UpdateError: a body that is not what it should be, or a refusal of the engine.
    """
    async with contextlib.AsyncExitStack() as room:
        async with backend.keep_update_open(id):
            digest = ContentDigest.parse(request.headers.get("content-digest"))
            body = await room.enter_async_context(_receive(backend, request, digest))
        content = body.content

        def read(start: int, size: int) -> bytes:
            return bytes(content[start : start + size])

        name, limit = f"chunk {chunk}", backend.bodies.limits.header_bytes
        header = read_header(read, body.length, name, limit)
        tensors = await backend.bodies.header(header, body.length, name)
        source = UploadSource(body.path, body.offset)
        arguments = stage_arguments(id, chunk, source, tensors, body.length)
        arguments["sha256"] = digest.sha256 if digest else None
        state: UpdateState = await backend.engine.job(Operation.STAGE, **arguments)
        return state


def _receive(
    backend: Backend, request: Request, digest: ContentDigest | None
) -> contextlib.AbstractAsyncContextManager[ReceivedBody]:
    """Return the room where the body of a request lies, once it has come."""
    length = request.headers.get("content-length")
    if length is not None and not (length.isdecimal() and len(length) <= _LENGTH_DIGITS):
        raise UpdateError(
            "length-required", f"Content-Length: expected a number, found {length!r:.40}", status=400
        )
    connection = Connection.of(request.scope, request.receive)
    size = int(length) if length else None
    return backend.spool.receive(_pieces(request), size, digest, connection)


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    try:
        async for piece in request.stream():
            yield piece
    except ClientDisconnect:
        raise UpdateError("truncated", "the client went away in the middle of the body", status=400) from None
