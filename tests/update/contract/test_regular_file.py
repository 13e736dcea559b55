# SPDX-License-Identifier: Apache-2.0
"""Files that are no files, or become others between two looks."""

import errno
import os
import time
from pathlib import Path

import pytest

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract.regular_file import (
    NotRegularError,
    descriptor_of,
    opened,
    path_error,
    stamp_of,
)
from vllm_fp8ext.update.contract.safetensors_header import file_tensors
from vllm_fp8ext.update.transports.files.message import FileSource
from vllm_fp8ext.update.transports.receiver import Receivers


@pytest.fixture
def file(tmp_path: Path) -> Path:
    import torch
    from safetensors.torch import save_file

    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    before = descriptors()
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/null")):
        with pytest.raises(NotRegularError, match="expected a regular file"):
            descriptor_of(path)
    with pytest.raises(UpdateError, match="expected a regular file") as caught:
        file_tensors(tmp_path / "pipe")
    assert caught.value.kind == "unreadable"
    assert descriptors() == before


def test_a_pipe_in_place_of_a_file_is_a_change(file: Path) -> None:
    source = FileSource(str(file), stamp_of(file.stat()))
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(UpdateError) as caught, Receivers().open(source, []):
        pytest.fail("it was opened")
    assert caught.value.kind == "file-changed"


@pytest.mark.parametrize("what", ["file", "folder", "allowed folder"])
def test_no_link_in_place_of_what_was_allowed_is_followed(file: Path, tmp_path: Path, what: str) -> None:
    """Not even to the same file."""
    folder = tmp_path / "allowed" / "deep"
    folder.mkdir(parents=True)
    file = file.rename(folder / file.name)
    source = FileSource(str(file), stamp_of(file.stat()), str(tmp_path / "allowed"))
    with Receivers().open(source, []):
        pass
    replaced = {"file": file, "folder": folder, "allowed folder": folder.parent}[what]
    replaced.rename(tmp_path / "away")
    replaced.symlink_to(tmp_path / "away")
    source = FileSource(source.path, stamp_of(file.stat()), source.folder)
    with pytest.raises(UpdateError) as caught, Receivers().open(source, []):
        pytest.fail("it was opened")
    assert (caught.value.kind, caught.value.status) == ("file-changed", 409)


@pytest.mark.parametrize(
    ("code", "kind", "status"),
    [
        (errno.ENOENT, "not-found", 404),
        (errno.ENOTDIR, "not-found", 404),
        (errno.ENAMETOOLONG, "not-found", 404),
        (errno.ELOOP, "file-changed", 409),
        (errno.EXDEV, "file-changed", 409),
        (errno.ESTALE, "file-changed", 409),
        (errno.EACCES, "unreadable", 422),
        (errno.EIO, "unreadable", 422),
    ],
)
def test_what_is_told_of_a_path_that_can_not_be_opened(code: int, kind: str, status: int) -> None:
    told = path_error("/a/b", OSError(code, os.strerror(code), "/c"))
    assert (told.kind, told.status) == (kind, status)
    assert str(told).startswith("/a/b")
    assert "/c" not in str(told)


def test_a_file_is_opened(file: Path) -> None:
    with opened(file) as content:
        assert content.read() == file.read_bytes()


def test_a_hard_link_leaves_a_version_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"same")
    before = stamp_of(file.stat())
    time.sleep(0.05)
    (tmp_path / "link").hardlink_to(file)
    assert stamp_of(file.stat()) == before
    os.utime(file, ns=(0, 0))
    assert stamp_of(file.stat()) != before
