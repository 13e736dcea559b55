# SPDX-License-Identifier: Apache-2.0
"""Uploads that fit, wait, or are refused; whatever happens, no file and no reserved room stays behind."""

import asyncio
import os
import resource
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.spool import Spool

LIMIT = 100


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    spool = Spool(str(tmp_path), LIMIT)
    yield spool
    assert list(spool.folder.iterdir()) == []
    spool.close()
    assert list(tmp_path.iterdir()) == []


async def pieces(*contents: bytes) -> AsyncIterator[bytes]:
    for content in contents:
        yield content


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


async def takes_everything(spool: Spool) -> None:
    """All of the spool's room can be had at once."""
    async with asyncio.timeout(2), spool.receive(pieces(b"x" * LIMIT), LIMIT) as file:
        assert file.read_bytes() == b"x" * LIMIT


async def refused(spool: Spool, body: AsyncIterator[bytes], length: int | None) -> UpdateError:
    with pytest.raises(UpdateError) as caught:
        async with spool.receive(body, length):
            pytest.fail("the body was taken")
    return caught.value


def test_a_body_is_a_file_as_long_as_the_context_lives(spool: Spool) -> None:
    async def main() -> None:
        async with spool.receive(pieces(b"abc", b"", b"defg"), 7) as file:
            assert file.read_bytes() == b"abcdefg"
            assert file.parent == spool.folder
            assert file.stat().st_mode & 0o077 == 0
        assert not file.exists()
        await takes_everything(spool)

    asyncio.run(main())


def test_the_folder_is_only_the_servers_own(spool: Spool) -> None:
    assert spool.folder.stat().st_mode & 0o077 == 0


def test_a_failure_in_the_context_removes_the_file(spool: Spool) -> None:
    async def main() -> None:
        with pytest.raises(RuntimeError, match="staging failed"):
            async with spool.receive(pieces(b"abc"), 3):
                raise RuntimeError("staging failed")
        await takes_everything(spool)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("contents", "found"), [((b"ab", b"cd"), 4), ((), 0), ((b"abcdef",), 6), ((b"abc", b"de", b"f" * 50), 55)]
)
def test_a_body_of_another_length_is_refused(spool: Spool, contents: tuple[bytes, ...], found: int) -> None:
    async def main() -> None:
        error = await refused(spool, pieces(*contents), 5)
        assert (error.kind, error.status, error.details) == ("truncated", 400, {"expected": 5})
        assert f"found {found}" in str(error)
        await takes_everything(spool)

    asyncio.run(main())


def test_a_body_that_is_too_long_is_not_read_to_its_end(spool: Spool) -> None:
    read = []

    async def long() -> AsyncIterator[bytes]:
        for _ in range(20):
            read.append(40)
            yield b"x" * 40

    async def main() -> None:
        assert (await refused(spool, long(), 50)).kind == "truncated"

    asyncio.run(main())
    assert len(read) == 2


def test_a_body_without_a_length_is_refused(spool: Spool) -> None:
    error = asyncio.run(refused(spool, pieces(b"abc"), None))
    assert (error.kind, error.status) == ("length-required", 411)


def test_a_body_beyond_the_spool_is_refused_at_once(spool: Spool) -> None:
    """Even when the spool is full: it could never be taken."""

    async def main() -> None:
        async with spool.receive(pieces(b"x" * LIMIT), LIMIT):
            error = await refused(spool, pieces(), LIMIT + 1)
        assert (error.kind, error.status, error.details) == ("chunk-too-large", 413, {"limit": LIMIT})

    asyncio.run(main())


def test_a_body_beyond_the_room_waits_and_is_not_read_before(spool: Spool) -> None:
    events: list[str] = []

    async def second_body() -> AsyncIterator[bytes]:
        events.append("second is read")
        yield b"y" * 50

    async def second() -> None:
        async with spool.receive(second_body(), 50) as file:
            assert file.read_bytes() == b"y" * 50

    async def main() -> None:
        async with spool.receive(pieces(b"x" * 60), 60):
            waiting = asyncio.create_task(second())
            await settle()
            assert events == []
            async with spool.receive(pieces(b"z" * 40), 40):
                events.append("third fits")
            await settle()
            assert events == ["third fits"]
        await asyncio.wait_for(waiting, 5)
        assert events == ["third fits", "second is read"]
        await takes_everything(spool)

    asyncio.run(main())


def test_many_uploads_never_hold_more_than_the_limit(spool: Spool) -> None:
    held = 0
    most = 0

    async def upload(size: int) -> None:
        nonlocal held, most
        async with spool.receive(pieces(b"x" * size), size) as file:
            held += size
            most = max(most, held)
            assert sum(path.stat().st_size for path in spool.folder.iterdir()) <= LIMIT
            await settle()
            assert file.stat().st_size == size
            held -= size

    async def main() -> None:
        await asyncio.wait_for(asyncio.gather(*(upload(10 + 13 * index % 60) for index in range(30))), 20)

    asyncio.run(main())
    assert 60 < most <= LIMIT


@pytest.mark.parametrize("moment", ["waiting", "reading", "staging"])
def test_a_cancelled_upload_leaves_nothing(spool: Spool, moment: str) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b"x" * 40
        if moment == "reading":
            await asyncio.Event().wait()
        yield b"x" * 40

    async def upload() -> None:
        async with spool.receive(body(), 80):
            await asyncio.Event().wait()

    async def cancel() -> None:
        task = asyncio.create_task(upload())
        await settle()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def main() -> None:
        if moment == "waiting":
            async with spool.receive(pieces(b"y" * 50), 50):
                await cancel()
        else:
            await cancel()
        await takes_everything(spool)

    asyncio.run(main())


def test_a_file_that_cannot_be_made_gives_its_room_back(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **kwargs: object) -> tuple[int, str]:
        raise OSError(28, os.strerror(28))

    async def main() -> None:
        with monkeypatch.context() as patch:
            patch.setattr("vllm_fp8ext.serve.spool.tempfile.mkstemp", full)
            with pytest.raises(UpdateError, match="No space"):
                async with spool.receive(pieces(b"x" * LIMIT), LIMIT):
                    pytest.fail("the body was taken")
        await takes_everything(spool)

    asyncio.run(main())


def test_a_file_that_was_not_written_whole_is_not_handed_on(spool: Spool) -> None:
    """A disk that is almost full takes a part of a write without an error. A limit on file sizes does the
    same."""

    async def main() -> None:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT // 2, before[1]))
        try:
            with pytest.raises(UpdateError) as refused:
                async with spool.receive(pieces(b"x" * LIMIT), LIMIT):
                    pytest.fail("a part was handed on")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert (refused.value.kind, refused.value.status) == ("spool-failed", 507)
        await takes_everything(spool)

    asyncio.run(main())


def test_a_folder_that_is_not_there_is_replaced_by_the_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_fp8ext.serve.spool.tempfile.gettempdir", lambda: str(tmp_path))
    spool = Spool("/does/not/exist", LIMIT)
    assert spool.folder.parent == tmp_path
    spool.close()
    spool.close()


def test_the_limit_is_what_the_disk_has(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path), 1 << 80)
    assert 0 < spool.limit < 1 << 80
    spool.close()
