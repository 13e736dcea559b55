# SPDX-License-Identifier: Apache-2.0
"""Tensors read from the mapped buffer and from files, and files that change meanwhile."""

import asyncio
import os
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract.manifest import TensorSpec
from vllm_fp8ext.update.contract.regular_file import TICK_SECONDS, settle, stamp_of
from vllm_fp8ext.update.contract.safetensors_header import StoredTensor, file_tensors, parse
from vllm_fp8ext.update.transports.files.message import FileSource
from vllm_fp8ext.update.transports.http.message import UploadSource
from vllm_fp8ext.update.transports.receiver import Receivers
from vllm_fp8ext.update.transports.transport import Source

WEIGHTS = {
    "matrix": torch.arange(3000.0).view(60, 50),
    "half": torch.linspace(-1, 1, 77).bfloat16(),
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 4, dtype=torch.float16),
}


def same(actual: Tensor, expected: Tensor) -> bool:
    return actual.dtype == expected.dtype and torch.equal(actual, expected)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(save(WEIGHTS))
    return path


def stamped(file: Path) -> FileSource:
    return FileSource(str(file), stamp_of(file.stat()))


def test_another_buffer_takes_the_place_of_the_former(tmp_path: Path) -> None:
    """A trainer that calls its engine anew has another, and has removed the former: none of its memory is held."""
    sources = Receivers()
    for name in ("first", "second", "first"):
        _read_zeros(sources, tmp_path / name)
        assert _mapped(tmp_path) == [name]
        (tmp_path / name).unlink()


def test_buffers_of_several_processes_stay_mapped(tmp_path: Path) -> None:
    """Each API server process has one: to lock their pages anew for each chunk would cost more than to read it."""
    sources = Receivers()
    for name in ("first", "second", "first"):
        _read_zeros(sources, tmp_path / name)
    assert _mapped(tmp_path) == ["first", "second"]


def _read_zeros(sources: Receivers, path: Path) -> None:
    if not path.exists():
        path.write_bytes(bytes(4096))
    stored = StoredTensor(TensorSpec("a", (2,), "float32"), 0, 8)
    with sources.open(UploadSource(str(path), 0), [stored]) as parts:
        for rows in parts:
            assert same(rows.values, torch.zeros(2))
        del rows, parts


def _mapped(folder: Path) -> list[str]:
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sorted(
        {Path(line.split()[5]).name for line in maps if f"{folder}/" in line and "(deleted)" not in line}
    )


@given(st.integers(0, 9000))
def test_mapped_and_read_tensors_are_equal(tmp_path_factory: pytest.TempPathFactory, offset: int) -> None:
    """Wherever a body lies in the buffer: also where no element of its dtype is aligned."""
    content = save(WEIGHTS)
    path = tmp_path_factory.mktemp("spool") / "spool"
    path.write_bytes(b"\xff" * offset + content + b"\xff" * 5)
    tensors = parse(lambda start, size: content[start : start + size], len(content), "body")
    shifted = [stored._replace(start=stored.start + offset) for stored in tensors]
    cases: list[tuple[Source, list[StoredTensor]]] = [
        (UploadSource(str(path), offset), tensors),
        (stamped(path), shifted),
    ]
    for source, of in cases:
        names = []
        with Receivers().open(source, of) as parts:
            for rows in parts:
                names.append(rows.stored.spec.name)
                assert rows.values.data_ptr() % rows.values.itemsize == 0
                assert (rows.first, rows.last) == (0, True)
                assert same(rows.values, WEIGHTS[names[-1]])
        assert names == [stored.spec.name for stored in tensors]


def test_the_buffer_is_mapped_once(tmp_path: Path) -> None:
    """What is written into it later is seen through the same map, although its name is gone."""
    path = tmp_path / "spool"
    path.write_bytes(bytes(4096))
    stored = StoredTensor(TensorSpec("a", (2,), "float32"), 8, 8)
    sources = Receivers()
    descriptor = os.open(path, os.O_RDWR)
    with sources.open(UploadSource(str(path), 16), [stored]) as parts:
        assert same(next(parts).values, torch.zeros(2))
    path.unlink()
    os.pwrite(descriptor, torch.tensor([1.0, -2.0]).numpy().tobytes(), 24)
    os.close(descriptor)
    with sources.open(UploadSource(str(path), 16), [stored]) as parts:
        assert same(next(parts).values, torch.tensor([1.0, -2.0]))


def test_a_file_that_stays_is_read(file: Path) -> None:
    with Receivers().open(stamped(file), file_tensors(file)) as parts:
        assert all(same(rows.values, WEIGHTS[rows.stored.spec.name]) for rows in parts)


def truncated(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def emptied(file: Path) -> None:
    os.truncate(file, 0)


def rewritten(file: Path) -> None:
    """In place, with contents of the same length; the clock of files is coarse."""
    before = file.stat()
    file.write_bytes(bytes(before.st_size))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


def grown(file: Path) -> None:
    with file.open("ab") as opened:
        opened.write(b"more")


changes = pytest.mark.parametrize(
    "change", [truncated, emptied, rewritten, grown], ids=lambda change: change.__name__
)


def replaced(file: Path) -> None:
    """By a file of the same size and time."""
    before = file.stat()
    other = file.with_suffix(".new")
    other.write_bytes(file.read_bytes())
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.rename(file)


def removed(file: Path) -> None:
    file.unlink()


def changed(work: Callable[[], None], file: Path) -> None:
    with pytest.raises(UpdateError, match=r"model\.safetensors was changed") as caught:
        work()
    assert (caught.value.kind, caught.value.status) == ("file-changed", 409)


@pytest.mark.parametrize(
    "change",
    [truncated, emptied, rewritten, grown, replaced, removed],
    ids=lambda change: change.__name__,
)
def test_a_file_that_changed_before_it_was_opened(file: Path, change: Callable[[Path], None]) -> None:
    source = stamped(file)
    change(file)

    def work() -> None:
        with Receivers().open(source, []):
            pytest.fail("it was opened")

    changed(work, file)


@pytest.mark.parametrize("index", [0, 1, len(WEIGHTS)])
@changes
def test_a_file_that_changes_while_it_is_read(file: Path, change: Callable[[Path], None], index: int) -> None:
    """Noticed by a read that finds too little, or at the end; never a signal, and never silently."""
    source, tensors = stamped(file), file_tensors(file)

    def work() -> None:
        with Receivers().open(source, tensors) as parts:
            for rows in islice(parts, index):
                assert same(rows.values, WEIGHTS[rows.stored.spec.name])
            change(file)
            for _ in parts:
                pass

    changed(work, file)


@pytest.mark.parametrize("change", [replaced, removed], ids=lambda change: change.__name__)
def test_a_file_that_loses_its_name_while_it_is_read_is_read_to_its_end_and_refused(
    file: Path, change: Callable[[Path], None]
) -> None:
    source, tensors = stamped(file), file_tensors(file)
    asyncio.run(settle([source.stamp]))

    def work() -> None:
        with Receivers().open(source, tensors) as parts:
            change(file)
            assert all(same(rows.values, WEIGHTS[rows.stored.spec.name]) for rows in parts)

    changed(work, file)


def test_files_are_closed(file: Path) -> None:
    source = stamped(file)

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    with Receivers().open(source, []):
        assert descriptors() == before + 1
    assert descriptors() == before
    with pytest.raises(RuntimeError, match="staging failed"), Receivers().open(source, []):
        raise RuntimeError("staging failed")
    assert descriptors() == before
    grown(file)
    with pytest.raises(UpdateError), Receivers().open(source, []):
        pytest.fail("it was opened")
    assert descriptors() == before


@pytest.mark.parametrize("round_", range(20))
def test_a_change_right_after_a_stamp_is_seen_although_files_clocks_are_coarse(
    file: Path, round_: int
) -> None:
    file.write_bytes(bytes(100))
    stamp = stamp_of(file.stat())
    asyncio.run(settle([stamp]))
    file.write_bytes(b"1" * 100)
    assert stamp_of(file.stat()) != stamp


def test_a_change_is_seen_whose_time_is_set_back(file: Path) -> None:
    """As programs do that copy a file with its time."""
    status, stamp = file.stat(), stamp_of(file.stat())
    asyncio.run(settle([stamp]))
    file.write_bytes(bytes(status.st_size))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file.stat().st_mtime_ns == stamp.modified_ns
    assert stamp_of(file.stat()) != stamp


def test_a_file_that_rests_is_not_waited_for(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stamp = stamp_of(file.stat())
    later = stamp.changed_ns + int(2 * TICK_SECONDS * 1e9)
    monkeypatch.setattr(time, "time_ns", lambda: later)

    def sleep(seconds: float) -> None:
        pytest.fail("it waited")

    monkeypatch.setattr(asyncio, "sleep", sleep)
    asyncio.run(settle([stamp, stamp]))


CLAIMED = """
import sys
from pathlib import Path
from vllm_fp8ext.update.transports.http.receiver import SharedBuffer

folder, page = Path(sys.argv[1]), 4096
for name, pages in (("fp8ext-x.spool", 40), ("psm_0123abcd", 30)):
    with open(folder / name, "wb") as file:
        file.truncate(pages * page)
shared = SharedBuffer(str(folder / "fp8ext-x.spool"), page_lock=True)
assert len(shared.content) == 40 * page
shared.close()
assert (folder / "fp8ext-x.spool").stat().st_blocks == 0
"""


def test_room_that_shared_memory_has_claimed_is_not_page_locked(
    on_a_small_disk: Callable[[str, str], Any],
) -> None:
    """Whose writer would be killed."""
    done = on_a_small_disk("256k", CLAIMED)
    assert done.returncode == 0, done.stderr
    assert "not page-locked: 163840 bytes more were needed, 139264 are free" in done.stderr
