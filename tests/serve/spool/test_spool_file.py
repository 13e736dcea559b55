# SPDX-License-Identifier: Apache-2.0
"""The spool's file: in a folder that is full, shared, or gone."""

import asyncio
import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_fp8ext.errors import ConfigError
from vllm_fp8ext.serve.spool import Spool
from vllm_fp8ext.serve.spool import _between as between

from .bodies import (
    LIMIT,
    PAGE,
    pages,
    pieces,
    refused,
    settle,
    takes_everything,
)

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


def test_processes_share_the_bytes_in_equal_parts(tmp_path: Path) -> None:
    """Each has a file of its own, which the other ones leave."""
    spools = [Spool(str(tmp_path), LIMIT, processes=3) for _ in range(3)]
    assert {spool.limit for spool in spools} == {LIMIT // 3 // PAGE * PAGE}
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= LIMIT
    assert len({spool.path for spool in spools}) == 3
    with pytest.raises(ConfigError, match=r"for each of 3 API server processes .* takes 20000"):
        spools[0].require_room(20000, "w alone")
    for spool in spools:
        spool.close()
    assert not list(tmp_path.iterdir())
