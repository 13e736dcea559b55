# SPDX-License-Identifier: Apache-2.0
"""Requests of a blocking thread, answered by an application on another thread's event loop."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
from anyio import to_thread
from anyio.from_thread import BlockingPortal

from vllm_fp8ext.serve.in_process_transport import InProcessTransport


class BlockingTransport(httpx.BaseTransport):
    """`InProcessTransport` of the event loop behind `portal`, for clients that block. Answers are read whole."""

    def __init__(self, portal: BlockingPortal, inner: httpx.AsyncBaseTransport) -> None:
        self._portal, self._own = portal, InProcessTransport(inner)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """The answer."""
        return self._portal.call(self._answer, request)

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        answer = await self._own.answer(request, _ReadInThread(request.stream))
        return httpx.Response(answer.status_code, headers=answer.headers, content=await answer.aread())


class _ReadInThread(httpx.AsyncByteStream):
    """A body that blocks while it is read."""

    def __init__(self, stream: Any) -> None:
        self._pieces: Iterator[bytes] = iter(stream)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (piece := await to_thread.run_sync(next, self._pieces, None)) is not None:
            yield piece
