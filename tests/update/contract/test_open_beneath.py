# SPDX-License-Identifier: Apache-2.0
"""What lies beneath a folder, by one call of the kernel and step by step."""

import errno
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from vllm_fp8ext.update.contract import open_beneath as beneath
from vllm_fp8ext.update.contract.open_beneath import open_beneath, open_real


@pytest.fixture(params=["openat2", "step by step"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "step by step":
        monkeypatch.setattr(beneath, "_has_openat2", lambda: False)
    elif not beneath._has_openat2():
        pytest.skip("this kernel has no openat2")
    return str(request.param)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """`inside/deep/file`, and links to it, to its folder, and to what lies outside."""
    deep = tmp_path / "inside" / "deep"
    deep.mkdir(parents=True)
    (deep / "file").write_text("inside")
    (tmp_path / "secret").write_text("outside")
    links = {
        "link": "deep/file",
        "linked": "deep",
        "out": str(tmp_path / "secret"),
        "up": "..",
        "dangling": "/no/such",
    }
    for name, target in links.items():
        (tmp_path / "inside" / name).symlink_to(target)
    return tmp_path / "inside"


@pytest.fixture
def descriptor(folder: Path) -> Iterator[int]:
    result = os.open(folder, os.O_PATH)
    yield result
    os.close(result)


def content(descriptor: int) -> str:
    with os.fdopen(descriptor) as file:
        return file.read()


def fails(code: int) -> AbstractContextManager[object]:
    return pytest.raises(OSError, match=rf"^\[Errno {code}\]")


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_what_lies_beneath_is_opened(folder: Path, descriptor: int) -> None:
    before = open_descriptors()
    assert content(open_beneath(descriptor, "deep/file", os.O_RDONLY)) == "inside"
    assert content(open_real(str(folder), str(folder / "deep" / "file"), os.O_RDONLY)) == "inside"
    assert content(open_real("/", str(folder / "deep" / "file"), os.O_RDONLY)) == "inside"
    for path in (str(folder), "/"):
        result = open_real(path, path, os.O_RDONLY)
        assert sorted(os.listdir(result)) == sorted(os.listdir(path))
        assert not os.get_inheritable(result)
        os.close(result)
    assert open_descriptors() == before


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_PATH], ids=["read", "path"])
@pytest.mark.parametrize("path", ["link", "linked/file", "out", "up/secret", "dangling"])
def test_no_link_is_followed(descriptor: int, path: str, flags: int) -> None:
    """Wherever it leads, and whether or not that exists."""
    before = open_descriptors()
    with fails(errno.ELOOP):
        open_beneath(descriptor, path, flags)
    assert open_descriptors() == before


@pytest.mark.parametrize("path", ["..", "../secret", "deep/../../secret", "{root}/secret"])
def test_nothing_above_is_opened(folder: Path, descriptor: int, path: str) -> None:
    with fails(errno.EXDEV):
        open_beneath(descriptor, path.format(root=folder.parent), os.O_RDONLY)


@pytest.mark.parametrize(
    ("path", "code"),
    [("missing", errno.ENOENT), ("deep/file/below", errno.ENOTDIR), ("x" * 256, errno.ENAMETOOLONG)],
)
def test_what_is_not_there_is_told_as_by_open(descriptor: int, path: str, code: int) -> None:
    before = open_descriptors()
    with fails(code):
        open_beneath(descriptor, path, os.O_RDONLY)
    assert open_descriptors() == before


def test_a_link_in_place_of_a_folder_on_the_way_is_not_followed(folder: Path, tmp_path: Path) -> None:
    """Neither beneath the allowed folder nor above it."""
    (folder / "deep").rename(folder / "away")
    (folder / "deep").symlink_to(folder / "away")
    with fails(errno.ELOOP):
        open_real(str(folder), str(folder / "deep" / "file"), os.O_RDONLY)
    folder.rename(tmp_path / "away")
    folder.symlink_to(tmp_path / "away")
    with fails(errno.ELOOP):
        open_real(str(folder), str(folder / "away" / "file"), os.O_RDONLY)
