# SPDX-License-Identifier: Apache-2.0
"""Requests to an application in the same process, on the same event loop."""

from collections.abc import AsyncIterator
from typing import Any

import httpx


class InProcessTransport(httpx.AsyncBaseTransport):
    """`inner`, by which an application is reached. What reading a body raises, the request raises, and the application sees a
    body that breaks off, as over a connection."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self._inner = inner

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """The answer."""
        return await self.answer(request, request.stream)

    async def answer(self, request: httpx.Request, stream: Any) -> httpx.Response:
        """The answer to a request whose body is this stream."""
        body = _Body(stream)
        sent = httpx.Request(
            request.method, request.url, headers=request.headers, stream=body, extensions=request.extensions
        )
        answer = await self._inner.handle_async_request(sent)
        if body.error is not None:
            raise body.error
        return answer


class _Body(httpx.AsyncByteStream):
    """`error`: why it broke off."""

    def __init__(self, stream: Any) -> None:
        self.error: Exception | None = None
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for piece in self._stream:
                yield piece
        except Exception as error:
            self.error = error
