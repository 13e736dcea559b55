# SPDX-License-Identifier: Apache-2.0
"""Bodies of uploads, and what tests look at."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.content_digest import ContentDigest
from vllm_fp8ext.serve.spool import ReceivedBody, Spool

PAGE = 4096
LIMIT = 10 * PAGE


async def pieces(*contents: bytes) -> AsyncIterator[bytes]:
    for content in contents:
        yield content


def pages(count: int, letter: bytes = b"x") -> AsyncIterator[bytes]:
    return pieces(*[letter * PAGE] * count)


async def stalled(content: bytes) -> AsyncIterator[bytes]:
    """A body that stops coming."""
    yield content
    await asyncio.Event().wait()


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


def on_disk(extent: ReceivedBody) -> bytes:
    """What another process finds."""
    with open(extent.path, "rb") as file:
        file.seek(extent.offset)
        return file.read(extent.length)


async def takes_everything(spool: Spool) -> None:
    """All of the spool's room can be had at once."""
    async with asyncio.timeout(10), spool.receive(pages(10), LIMIT) as extent:
        assert (extent.offset, bytes(extent.content)) == (0, b"x" * LIMIT)


async def refused(
    spool: Spool, body: AsyncIterator[bytes], length: int | None, digest: ContentDigest | None = None
) -> UpdateError:
    with pytest.raises(UpdateError) as caught:
        async with spool.receive(body, length, digest):
            pytest.fail("the body was taken")
    return caught.value
