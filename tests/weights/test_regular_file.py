# SPDX-License-Identifier: Apache-2.0
"""Files that are no files, or become others between two looks."""

import asyncio
import os
from pathlib import Path

import pytest

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.weights.regular_file import NotRegularError, descriptor_of, opened, settled_stamp
from vllm_fp8ext.weights.safetensors_header import file_tensors
from vllm_fp8ext.weights.source import Source, Sources


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
    source = Source(str(file), 0, asyncio.run(settled_stamp(file)))
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(UpdateError) as caught, Sources().open(source, []):
        pytest.fail("it was opened")
    assert caught.value.kind == "file-changed"


@pytest.mark.parametrize("when", ["before its stamp", "after it"])
def test_nothing_is_read_by_a_link_in_place_of_a_file(file: Path, tmp_path: Path, when: str) -> None:
    """It may lead to where no checkpoint may be read; its first bytes would be told in a message."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"TOPSECRT" * 8)
    stamp = asyncio.run(settled_stamp(file))
    file.unlink()
    file.symlink_to(elsewhere)
    if when == "before its stamp":
        stamp = asyncio.run(settled_stamp(file))
    with pytest.raises(UpdateError, match=r"a\.safetensors was changed before it was read$") as caught:
        file_tensors(file, stamp)
    assert caught.value.kind == "file-changed"


def test_a_version_is_read_that_is_still_there(file: Path) -> None:
    assert file_tensors(file, asyncio.run(settled_stamp(file))) == file_tensors(file)
    with opened(file) as content:
        assert content.read() == file.read_bytes()
