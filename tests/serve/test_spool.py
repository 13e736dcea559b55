# SPDX-License-Identifier: Apache-2.0
"""Uploads that fit, wait, or are refused; whatever happens, no reserved room stays behind."""

import asyncio
import base64
import contextlib
import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_fp8ext.errors import ConfigError, UpdateError
from vllm_fp8ext.serve.content_digest import ContentDigest
from vllm_fp8ext.serve.spool import ReceivedBody, Spool
from vllm_fp8ext.serve.spool import _between as between

PAGE = 4096
LIMIT = 10 * PAGE


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    spool = Spool(str(tmp_path), LIMIT)
    yield spool
    assert list(tmp_path.iterdir()) == [spool.path]
    spool.close()
    assert list(tmp_path.iterdir()) == []
    spool.close()


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
    ("contents", "found"), [((b"ab", b"cd"), 4), ((), 0), ((b"abcdef",), 6), ((b"abc", b"de", b"f" * 50), 55)]
)
def test_a_body_of_another_length_is_refused(spool: Spool, contents: tuple[bytes, ...], found: int) -> None:
    async def main() -> None:
        error = await refused(spool, pieces(*contents), 5)
        assert (error.kind, error.status, error.details) == ("truncated", 400, {"expected": 5})
        assert f"found {found}" in str(error)
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


# --- waiting for room


def test_a_body_beyond_the_room_waits_and_is_not_read_before(spool: Spool) -> None:
    events: list[str] = []

    async def second_body() -> AsyncIterator[bytes]:
        events.append("second is read")
        yield b"y" * 5 * PAGE

    async def second() -> None:
        async with spool.receive(second_body(), 5 * PAGE) as extent:
            assert on_disk(extent) == b"y" * 5 * PAGE

    async def main() -> None:
        async with spool.receive(pages(6), 6 * PAGE) as first:
            waiting = asyncio.create_task(second())
            await settle()
            assert events == []
            assert on_disk(first) == b"x" * 6 * PAGE
        await asyncio.wait_for(waiting, 10)
        assert events == ["second is read"]
        await takes_everything(spool)

    asyncio.run(main())


def test_room_is_given_in_order_of_arrival(spool: Spool) -> None:
    """Small bodies that would fit wait behind a big one that needs all the room: it would starve otherwise."""
    events: list[str] = []

    async def upload(name: str, count: int, until: asyncio.Event) -> None:
        async with spool.receive(pages(count), count * PAGE):
            events.append(name)
            await until.wait()

    async def main() -> None:
        first_done, others_done = asyncio.Event(), asyncio.Event()
        others_done.set()
        tasks = [asyncio.create_task(upload("first", 4, first_done))]
        while not events:
            await asyncio.sleep(0.001)
        for name, count in (("big", 10), ("small 1", 1), ("small 2", 1)):
            await settle()
            tasks.append(asyncio.create_task(upload(name, count, others_done)))
        await settle()
        assert events == ["first"]
        first_done.set()
        await asyncio.wait_for(asyncio.gather(*tasks), 10)
        assert sorted(events) == ["big", "first", "small 1", "small 2"]
        await takes_everything(spool)

    asyncio.run(main())


def test_one_that_stops_waiting_does_not_hold_up_the_next(spool: Spool) -> None:
    async def wait_for_room(count: int) -> None:
        async with spool.receive(pages(count), count * PAGE):
            pass

    async def main() -> None:
        async with spool.receive(pages(4), 4 * PAGE):
            big = asyncio.create_task(wait_for_room(10))
            await settle()
            small = asyncio.create_task(wait_for_room(1))
            await settle()
            assert not small.done()
            big.cancel()
            await asyncio.wait_for(small, 10)
        await takes_everything(spool)

    asyncio.run(main())


@given(
    st.lists(
        st.tuples(st.integers(0, LIMIT), st.sampled_from(("good", "short", "failing", "cancelled"))),
        max_size=15,
    )
)
@settings(max_examples=40)
def test_extents_never_overlap_and_all_room_comes_back(
    tmp_path_factory: pytest.TempPathFactory, uploads: list[tuple[int, str]]
) -> None:
    spool = Spool(str(tmp_path_factory.mktemp("spool")), LIMIT)
    held: list[tuple[int, int]] = []

    async def upload(number: int, size: int, fate: str) -> None:
        content = bytes([number + 1]) * size
        body = pieces(content[: size // 2], b"" if fate == "short" else content[size // 2 :])
        async with spool.receive(body, size) as extent:
            own = extent.offset, extent.offset + size
            assert 0 <= own[0] <= own[1] <= spool.limit
            assert not size or all(own[1] <= start or stop <= own[0] for start, stop in held if start < stop)
            held.append(own)
            try:
                if fate == "cancelled":
                    await asyncio.Event().wait()
                await settle()
                assert bytes(extent.content) == on_disk(extent) == content
                if fate == "failing":
                    raise RuntimeError("staging failed")
            finally:
                held.remove(own)

    async def main() -> None:
        tasks = [asyncio.create_task(upload(number, *each)) for number, each in enumerate(uploads)]
        cancelled = [task for task, (_, fate) in zip(tasks, uploads, strict=True) if fate == "cancelled"]
        while cancelled:
            await settle()
            cancelled.pop().cancel()
        outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
        for (size, fate), outcome in zip(uploads, outcomes, strict=True):
            expected = {"good": type(None), "short": UpdateError, "failing": RuntimeError}
            kind = expected.get(fate, asyncio.CancelledError)
            assert isinstance(outcome, kind) or (fate == "short" and not size), (fate, outcome)
        await takes_everything(spool)

    asyncio.run(main())
    spool.close()


# --- bodies that stop, and folders that are full


@pytest.mark.parametrize("content", [b"", b"abc"])
def test_an_upload_that_stalls_gives_its_room_back(tmp_path: Path, content: bytes) -> None:
    spool = Spool(str(tmp_path), LIMIT, idle_seconds=0.2)

    async def main() -> None:
        error = await refused(spool, stalled(content), LIMIT)
        assert (error.kind, error.status) == ("upload-stalled", 408)
        assert f"after {len(content)} of {LIMIT} bytes" in str(error)
        await takes_everything(spool)

    asyncio.run(main())
    spool.close()


def test_waiting_for_room_and_staging_are_not_stalling(tmp_path: Path) -> None:
    """Only the client is held to the time between two pieces: what it waits for is not its fault."""
    spool = Spool(str(tmp_path), LIMIT, idle_seconds=0.2)

    async def second() -> None:
        async with spool.receive(pages(10), LIMIT):
            pass

    async def main() -> None:
        async with spool.receive(pages(10), LIMIT):
            waiting = asyncio.create_task(second())
            await asyncio.sleep(0.1)
            assert not waiting.done()
        await asyncio.wait_for(waiting, 10)

    asyncio.run(main())
    spool.close()


@pytest.mark.parametrize("moment", ["waiting", "reading", "staging"])
def test_a_cancelled_upload_leaves_nothing(spool: Spool, moment: str) -> None:
    async def upload() -> None:
        body = stalled(b"x") if moment == "reading" else pages(8)
        async with spool.receive(body, 8 * PAGE):
            await asyncio.Event().wait()

    async def cancel() -> None:
        task = asyncio.create_task(upload())
        await settle()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def main() -> None:
        if moment == "waiting":
            async with spool.receive(pages(5), 5 * PAGE):
                await cancel()
        else:
            await cancel()
        await takes_everything(spool)

    asyncio.run(main())


def test_while_the_folder_gives_room_others_end_and_can_be_cancelled(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    allocate = os.posix_fallocate

    def slowly(*arguments: int) -> None:
        go_on.wait(60)
        allocate(*arguments)

    async def upload(until: asyncio.Event) -> None:
        async with spool.receive(pages(2), 2 * PAGE):
            await until.wait()

    async def main() -> None:
        done = asyncio.Event()
        first = asyncio.create_task(upload(done))
        cancelled = asyncio.create_task(upload(asyncio.Event()))
        while spool._backed != [(0, 4 * PAGE)]:
            await asyncio.sleep(0.001)
        monkeypatch.setattr(os, "posix_fallocate", slowly)
        second = asyncio.create_task(upload(done))
        await settle()
        done.set()
        cancelled.cancel()
        await asyncio.wait_for(first, 5)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(cancelled, 5)
        assert not second.done()
        go_on.set()
        await asyncio.wait_for(second, 10)
        await takes_everything(spool)

    asyncio.run(main())


def test_what_a_silent_rank_may_still_read_is_not_given_to_another(spool: Spool) -> None:
    """Its bytes would be staged as those of the upload that was given up."""

    async def main() -> None:
        async def give_up() -> ReceivedBody:
            with contextlib.suppress(UpdateError):
                async with spool.receive(pages(4), 4 * PAGE) as extent:
                    raise UpdateError("engine-timeout", "a rank is silent", status=504)
            return extent

        held = await give_up()
        kept = bytes(held.content)
        async with asyncio.timeout(10), spool.receive(pages(6), 6 * PAGE) as other:
            assert other.offset >= held.offset + held.length
            assert bytes(held.content) == kept
        async with asyncio.timeout(10):
            with pytest.raises(UpdateError, match="none is left") as refused:
                async with spool.receive(pages(LIMIT // PAGE), LIMIT):
                    pass
            assert (refused.value.kind, refused.value.status) == ("engine-timeout", 504)
            async with spool.receive(pages(1), PAGE):
                pass

    asyncio.run(main())


FULL = """
import asyncio, sys
from pathlib import Path
from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.spool import Spool

folder, page = Path(sys.argv[1]), 4096
spool = Spool(str(folder), 1 << 30)
assert spool.limit == 64 * page, spool.limit


async def body(count):
    for _ in range(count):
        yield b"x" * page


async def take(count):
    async with spool.receive(body(count), count * page) as extent:
        return len(extent.content.tobytes())


async def main():
    assert await take(8) == 8 * page
    other = folder / "other"
    other.write_bytes(b"x" * page * 40)
    for count in (25, 64):
        try:
            await take(count)
        except UpdateError as error:
            assert (error.kind, error.status) == ("spool-failed", 507) and str(spool.path) in str(error), error
        else:
            raise AssertionError("a body beyond the disk was taken")
        assert await take(24) == 24 * page
    other.unlink()
    assert await take(64) == 64 * page


asyncio.run(main())
"""


def test_a_body_for_which_the_folder_is_too_full_is_refused(on_a_small_disk: Callable[..., Any]) -> None:
    """On a file system of 64 pages, which others fill meanwhile."""
    done = on_a_small_disk("256k", FULL)
    assert done.returncode == 0, done.stderr


RINGS = """
import asyncio, os, sys
from pathlib import Path
from vllm_fp8ext.errors import ConfigError, UpdateError
from vllm_fp8ext.serve.spool import Spool

folder, page = Path(sys.argv[1]), 4096


def ring(name, pages, touched):
    with open(folder / name, "wb") as file:
        file.truncate(pages * page)
        file.write(b"x" * page * touched)
        return folder / name


async def body(count):
    for _ in range(count):
        yield b"x" * page


async def take(spool, count):
    async with spool.receive(body(count), count * page):
        pass


async def main():
    first = ring("psm_0123abcd", 24, 4)
    ring("other", 1000, 0)
    spool = Spool(str(folder), 1 << 30)
    assert spool.limit == 40 * page, spool.limit
    await take(spool, 8)
    second = ring("psm_4567cdef", 30, 0)
    for count in (16, 40):
        try:
            await take(spool, count)
        except UpdateError as error:
            assert (error.kind, error.status) == ("spool-failed", 507) and "has claimed" in str(error), error
        else:
            raise AssertionError("an upload took what a ring will need")
    await take(spool, 10)
    for file in (first, second):
        with open(file, "r+b") as touching:
            touching.write(b"y" * file.stat().st_size)
    await take(spool, 10)
    first.unlink()
    await take(spool, 34)
    for alone in (20, 65):
        second.unlink()
        second = ring("psm_4567cdef", 10 + alone, 10)
        try:
            Spool(str(folder), 1 << 30)
        except ConfigError as error:
            assert f"{alone * page} of them that vLLM's shared memory has claimed" in str(error), error
        else:
            raise AssertionError("room was promised twice")


asyncio.run(main())
"""


def test_uploads_leave_what_rings_of_shared_memory_will_need(on_a_small_disk: Callable[..., Any]) -> None:
    """A ring has its size at once, its room as it is written to: its writer is killed where there is none."""
    done = on_a_small_disk("256k", RINGS)
    assert done.returncode == 0, done.stderr


# --- the file


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a folder"):
        Spool(str(tmp_path / "missing"), LIMIT)


def test_a_spool_without_a_page_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is full"):
        Spool(str(tmp_path), PAGE - 1)
    assert list(tmp_path.iterdir()) == []


def test_the_limit_is_what_the_disk_has(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path), 1 << 60)
    assert 0 < spool.limit < 1 << 60
    assert spool.limit % PAGE == 0
    assert spool.path.stat().st_blocks == 0, "room is taken when it is needed"
    spool.close()


def test_what_could_never_be_sent_is_an_error(spool: Spool) -> None:
    spool.require_room(LIMIT, "lm_head.weight")
    with pytest.raises(ConfigError, match=rf"lm_head\.weight takes {LIMIT + 1}.*--shm-size"):
        spool.require_room(LIMIT + 1, "lm_head.weight")


def test_ranks_that_have_it_mapped_keep_it(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path), LIMIT)
    descriptor = os.open(spool.path, os.O_RDONLY)

    async def main() -> None:
        async with spool.receive(pieces(b"abc"), 3) as extent:
            spool.close()
            assert os.pread(descriptor, 3, extent.offset) == b"abc" == bytes(extent.content)

    asyncio.run(main())
    os.close(descriptor)


def test_what_a_killed_server_left_is_removed(tmp_path: Path) -> None:
    alive = Spool(str(tmp_path), 1 << 20)
    other = tmp_path / "fp8ext-notes.txt"
    other.touch()
    script = (
        "import os, sys; from vllm_fp8ext.serve.spool import Spool; Spool(sys.argv[1], 1 << 20); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-P", "-c", script, str(tmp_path)], check=False).returncode == 9
    assert len([*tmp_path.glob("*.spool")]) == 2
    own = Spool(str(tmp_path), 1 << 20)
    assert {*tmp_path.iterdir()} == {alive.path, own.path, other}
    alive.close()
    own.close()
    assert [*tmp_path.iterdir()] == [other]


def test_a_pipe_of_that_name_is_not_waited_for(tmp_path: Path) -> None:
    """Everybody may make one where everybody may write."""
    os.mkfifo(tmp_path / "fp8ext-x.spool")
    Spool(str(tmp_path), LIMIT).close()
    assert [path.name for path in tmp_path.iterdir()] == ["fp8ext-x.spool"]


def test_one_that_is_closed_takes_no_memory(tmp_path: Path) -> None:
    def used() -> bool:
        opened = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        return str(tmp_path) in "".join(opened) + Path("/proc/self/maps").read_text()

    async def main() -> None:
        spool = Spool(str(tmp_path), LIMIT)
        await takes_everything(spool)
        assert used()
        spool.close()
        assert not used()
        error = await refused(spool, pages(1), PAGE)
        assert (error.kind, error.status) == ("spool-failed", 507)
        assert "closed" in str(error)

    asyncio.run(main())


def test_a_file_that_another_server_is_about_to_remove_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, created = [], tempfile.mkstemp

    def taken_at_once(**where: str) -> tuple[int, str]:
        descriptor, name = created(**where)
        if not made:
            made.append(os.open(name, os.O_RDONLY))
            fcntl.flock(made[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        return descriptor, name

    monkeypatch.setattr(tempfile, "mkstemp", taken_at_once)
    spool = Spool(str(tmp_path), LIMIT)
    assert os.fstat(made[0]).st_ino != spool.path.stat().st_ino
    os.close(made[0])
    spool.close()


def test_room_is_had_for_each_upload_wherever_it_lies(tmp_path: Path) -> None:
    """A small one may lie behind what a large one waits for, of which nothing was touched yet."""
    spool = Spool(str(tmp_path), LIMIT)

    async def main() -> None:
        async with spool.receive(pages(6), 6 * PAGE):
            large = asyncio.ensure_future(held(8))
            await settle()
            async with spool.receive(pages(2, b"s"), 2 * PAGE) as small:
                assert small.offset == 8 * PAGE
                assert spool._backed == [(0, 6 * PAGE), (8 * PAGE, 10 * PAGE)]
                assert not large.done()
        assert await large == b"l" * 8 * PAGE
        assert spool._backed == [(0, LIMIT)]
        assert spool.path.stat().st_blocks * 512 >= LIMIT

    async def held(count: int) -> bytes:
        async with spool.receive(pages(count, b"l"), count * PAGE) as extent:
            return bytes(extent.content)

    try:
        asyncio.run(asyncio.wait_for(main(), 20))
    finally:
        spool.close()


@pytest.mark.parametrize(
    ("ranges", "missing"),
    [
        ([], [(2, 7)]),
        ([(0, 3)], [(3, 7)]),
        ([(0, 9)], []),
        ([(3, 4), (5, 6)], [(2, 3), (4, 5), (6, 7)]),
        ([(7, 9)], [(2, 7)]),
        ([(0, 1), (8, 9)], [(2, 7)]),
    ],
)
def test_only_what_is_missing_is_asked_for(
    ranges: list[tuple[int, int]], missing: list[tuple[int, int]]
) -> None:
    assert between(2, 7, ranges) == missing
