# SPDX-License-Identifier: Apache-2.0
"""Requests of a thread that blocks, to an application in the same process."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from anyio.from_thread import start_blocking_portal

from vllm_fp8ext.serve.blocking_transport import BlockingTransport

Client = tuple[httpx.Client, list[int]]


@pytest.fixture
def client() -> Iterator[Client]:
    """And the number of bytes of each body that an application took, which refuses one that breaks off."""
    taken: list[int] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        size, more = 0, True
        while more:
            message = await receive()
            size, more = size + len(message.get("body", b"")), message.get("more_body", False)
        taken.append(size)
        expected = int(dict(scope["headers"])[b"content-length"])
        await send({"type": "http.response.start", "status": 200 if size == expected else 400, "headers": []})
        await send({"type": "http.response.body", "body": b"taken"})

    with start_blocking_portal() as portal:
        transport = BlockingTransport(portal, httpx.ASGITransport(application))
        with httpx.Client(transport=transport, base_url="http://there") as http:
            yield http, taken


def test_a_body_arrives_whole(client: Client) -> None:
    http, taken = client
    answer = http.put("/", content=iter([b"abc", b"", b"de"]), headers={"Content-Length": "5"})
    assert (answer.status_code, answer.content, taken) == (200, b"taken", [5])


def test_what_reading_a_body_raises_the_request_raises(client: Client) -> None:
    """The application sees a body that breaks off, as it would over a connection."""
    http, taken = client

    def broken() -> Iterator[bytes]:
        yield b"abc"
        raise FileNotFoundError("a shard is gone")

    with pytest.raises(FileNotFoundError, match="a shard is gone"):
        http.put("/", content=broken(), headers={"Content-Length": "5"})
    assert taken == [3]
