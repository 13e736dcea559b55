# SPDX-License-Identifier: Apache-2.0
"""Requests of a thread that blocks, answered by an application on the event loop of another thread."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
from anyio import to_thread
from anyio.from_thread import BlockingPortal


class BlockingTransport(httpx.BaseTransport):
    """`inner`, a transport of the event loop behind `portal`, for clients that block. Answers are read whole. What reading a
    body raises, the request raises."""

    def __init__(self, portal: BlockingPortal, inner: httpx.AsyncBaseTransport) -> None:
        self._portal, self._inner = portal, inner

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """The answer."""
        return self._portal.call(self._answer, request)

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        body = _ReadInThread(request.stream)
        asked = httpx.Request(
            request.method, request.url, headers=request.headers, stream=body, extensions=request.extensions
        )
        answer = await self._inner.handle_async_request(asked)
        content = await answer.aread()
        if body.error is not None:
            raise body.error
        return httpx.Response(answer.status_code, headers=answer.headers, content=content)


class _ReadInThread(httpx.AsyncByteStream):
    """A body that blocks while it is read. One that fails just ends, as over a connection; `error` tells why."""

    def __init__(self, stream: Any) -> None:
        self.error: Exception | None = None
        self._pieces: Iterator[bytes] = iter(stream)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (piece := await to_thread.run_sync(self._next)) is not None:
            yield piece

    def _next(self) -> bytes | None:
        try:
            return next(self._pieces, None)
        except Exception as error:
            self.error = error
            return None
