# SPDX-License-Identifier: Apache-2.0
"""Requests to an application on the same event loop."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from vllm_fp8ext.serve.in_process_transport import InProcessTransport


def test_what_reading_a_body_raises_the_request_raises() -> None:
    """The application sees a body that breaks off, as it would over a connection."""
    taken: list[bytes] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        more = True
        while more:
            message = await receive()
            taken.append(message.get("body", b""))
            more = message.get("more_body", False)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"taken"})

    async def body(whole: bool) -> AsyncIterator[bytes]:
        yield b"abc"
        if not whole:
            raise FileNotFoundError("a shard is gone")

    async def ask() -> None:
        transport = InProcessTransport(httpx.ASGITransport(application))
        async with httpx.AsyncClient(transport=transport, base_url="http://there") as http:
            answer = await http.put("/", content=body(whole=True))
            assert (answer.status_code, answer.content) == (200, b"taken")
            with pytest.raises(FileNotFoundError, match="a shard is gone"):
                await http.put("/", content=body(whole=False))

    asyncio.run(ask())
    assert b"".join(taken) == b"abcabc"
