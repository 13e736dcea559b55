# SPDX-License-Identifier: Apache-2.0
"""Uploads that fit, wait, or are refused; whatever happens, no reserved room stays behind."""

import asyncio
import base64
import hashlib
from collections.abc import AsyncIterator

import pytest

from vllm_fp8ext.serve.content_digest import ContentDigest
from vllm_fp8ext.serve.spool import Spool

from .bodies import (
    LIMIT,
    PAGE,
    on_disk,
    pages,
    pieces,
    refused,
    takes_everything,
)


def test_a_body_is_an_extent_as_long_as_the_context_lives(spool: Spool) -> None:
    async def main() -> None:
        async with spool.receive(pieces(b"abc", b"", b"defg"), 7) as first:
            assert (first.path, first.length) == (str(spool.path), 7)
            assert bytes(first.content) == on_disk(first) == b"abcdefg"
            async with spool.receive(pieces(b"hi"), 2) as second:
                assert bytes(second.content) == on_disk(second) == b"hi"
                assert second.offset % PAGE == 0
            assert on_disk(first) == b"abcdefg"
        await takes_everything(spool)

    asyncio.run(main())


def test_an_empty_body_needs_no_room(spool: Spool) -> None:
    async def main() -> None:
        async with spool.receive(pages(10), LIMIT), spool.receive(pieces(), 0) as extent:
            assert bytes(extent.content) == b""
        await takes_everything(spool)

    asyncio.run(main())


def test_the_file_is_only_the_servers_own(spool: Spool) -> None:
    assert spool.path.stat().st_mode & 0o077 == 0


def test_a_failure_in_the_context_gives_the_room_back(spool: Spool) -> None:
    async def main() -> None:
        with pytest.raises(RuntimeError, match="staging failed"):
            async with spool.receive(pieces(b"abc"), 3):
                raise RuntimeError("staging failed")
        await takes_everything(spool)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("contents", "size"), [((b"ab", b"cd"), 4), ((), 0), ((b"abcdef",), 6), ((b"abc", b"de", b"f" * 50), 55)]
)
def test_a_body_of_another_length_is_refused(spool: Spool, contents: tuple[bytes, ...], size: int) -> None:
    async def main() -> None:
        error = await refused(spool, pieces(*contents), 5)
        assert (error.kind, error.status, error.details) == ("truncated", 400, {"expected": 5})
        assert f"found {size}" in str(error)
        await takes_everything(spool)

    asyncio.run(main())


def test_a_body_that_is_too_long_is_neither_read_nor_written_to_its_end(spool: Spool) -> None:
    read = []

    async def long() -> AsyncIterator[bytes]:
        for _ in range(20):
            read.append(40)
            yield b"y" * 40

    async def main() -> None:
        async with spool.receive(pages(10), LIMIT):
            pass
        assert (await refused(spool, long(), 50)).kind == "truncated"

    asyncio.run(main())
    assert len(read) == 2
    assert b"y" * 41 not in spool.path.read_bytes()


def test_a_body_without_a_length_is_refused(spool: Spool) -> None:
    error = asyncio.run(refused(spool, pieces(b"abc"), None))
    assert (error.kind, error.status) == ("length-required", 411)


def test_a_body_beyond_the_spool_is_refused_at_once(spool: Spool) -> None:
    """Even when the spool is full: it could never be taken."""

    async def main() -> None:
        async with spool.receive(pages(10), LIMIT):
            error = await refused(spool, pieces(), LIMIT + 1)
        assert (error.kind, error.status, error.details) == ("chunk-too-large", 413, {"limit": LIMIT})

    asyncio.run(main())


def test_a_body_of_another_digest_is_refused(spool: Spool) -> None:
    body = b"abc" * 1000
    right = base64.b64encode(hashlib.sha256(body).digest()).decode()

    async def main() -> None:
        for content, kind in ((body, None), (body[:-1] + b"d", "digest-mismatch")):
            digest = ContentDigest.parse(f"sha-256=:{right}:")
            if kind:
                assert (await refused(spool, pieces(content), len(body), digest)).kind == kind
            else:
                async with spool.receive(pieces(content), len(body), digest):
                    pass
        await takes_everything(spool)

    asyncio.run(main())
