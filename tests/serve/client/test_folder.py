# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on disk that change while they are pushed: one of them is served whole, or none."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.client.source import tensors_of
from vllm_fp8ext.update.transports.wire import stored

from .conftest import Caller
from .server import Server

FILES = 4
CHUNK = 40
"""Bytes of a tensor: each is a chunk."""


def write(folder: Path, value: float) -> Path:
    """A checkpoint of four files, whose tensors have this value."""
    folder.mkdir()
    for n in range(FILES):
        save_file({f"w{n}": torch.full((10,), value)}, folder / f"model-{n}.safetensors")
    return folder


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return write(tmp_path / "old", 1.0)


@pytest.fixture
def new(tmp_path: Path) -> Path:
    return write(tmp_path / "new", 2.0)


def values(server: Server) -> dict[str, float]:
    return {name: tensor[0].item() for name, tensor in server.served.items()}


def once(change: Callable[[], None], after: int) -> Callable[[int, int | None], None]:
    """Progress that brings a change when this many bytes have been sent."""
    left = [change]

    def progress(sent: int, total: int | None) -> None:
        if left and sent >= after:
            left.pop()()

    return progress


def moved(link: Path, target: Path) -> None:
    link.with_name("next").symlink_to(target)
    link.with_name("next").rename(link)


def replaced(file: Path, other: Path) -> None:
    shutil.copy(other, file.with_name("coming"))
    file.with_name("coming").rename(file)


def rewritten(file: Path, other: Path) -> None:
    """In place, by as many bytes."""
    with file.open("r+b") as content:
        content.write(other.read_bytes())


def rewritten_under_its_time(file: Path, other: Path) -> None:
    """As tools do that set a file's time to that of a copy."""
    before = file.stat()
    rewritten(file, other)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("of_file", [True, False])
def test_a_link_is_followed_once(
    caller: Caller, server: Server, old: Path, new: Path, tmp_path: Path, checksum: bool, of_file: bool
) -> None:
    """Also one to a file."""
    if of_file:
        for folder, value in ((old, 1.0), (new, 2.0)):
            save_file({f"w{n}": torch.full((10,), value) for n in range(FILES)}, folder / "all.safetensors")
        old, new = old / "all.safetensors", new / "all.safetensors"
    latest = tmp_path / "latest"
    latest.symlink_to(old)
    progress = once(lambda: moved(latest, new), 1)
    options = {"chunk_bytes": CHUNK, "chunks_in_flight": 1, "checksum": checksum, "progress": progress}
    caller(server.url, "push", latest, **options)
    assert latest.resolve() == new
    assert values(server) == {f"w{n}": 1.0 for n in range(FILES)}


@pytest.mark.parametrize("change", [replaced, rewritten, rewritten_under_its_time])
@pytest.mark.parametrize("n", [0, FILES - 1])
@pytest.mark.parametrize("chunks", [1, FILES])
def test_files_that_change_are_refused(
    caller: Caller,
    server: Server,
    old: Path,
    new: Path,
    change: Callable[[Path, Path], None],
    n: int,
    chunks: int,
) -> None:
    """One that was read already, and one that is still to be read; early, and when the last chunk has been sent."""
    name = f"model-{n}.safetensors"
    size = (old / name).stat().st_size
    progress = once(lambda: change(old / name, new / name), (chunks - 1) * size + 1)
    with pytest.raises(UpdateError, match=f"{name} was changed while it was read") as refused:
        caller(server.url, "push", old, chunk_bytes=CHUNK, chunks_in_flight=1, progress=progress)
    assert refused.value.kind == "file-changed"
    assert server.states == ["abandoned"]
    assert server.served == {}


def test_a_folder_that_goes_away_is_refused(caller: Caller, server: Server, old: Path) -> None:
    progress = once(lambda: shutil.rmtree(old), 1)
    with pytest.raises(UpdateError, match="was changed while it was read"):
        caller(server.url, "push", old, chunk_bytes=CHUNK, chunks_in_flight=1, progress=progress)
    assert server.states == ["abandoned"]


@pytest.mark.parametrize("change", [replaced, rewritten])
@pytest.mark.parametrize("n", [0, FILES - 1])
def test_tensors_of_a_checkpoint_are_of_one_version(
    old: Path, new: Path, change: Callable[[Path, Path], None], n: int
) -> None:
    """As `ipc`, `nccl` and `fp8` take them from a path."""
    name = f"model-{n}.safetensors"
    tensors = stored(old, "cpu")
    first = next(tensors)[1]
    change(old / name, new / name)
    with pytest.raises(UpdateError, match=f"{name} was changed while it was read"):
        list(tensors)
    assert first.tolist() == [1.0] * 10, "memory of its own"


def test_a_link_is_followed_once_for_tensors(old: Path, new: Path, tmp_path: Path) -> None:
    latest = tmp_path / "latest"
    latest.symlink_to(old)

    def manifests() -> Iterator[None]:
        yield from ()

    flow = tensors_of(latest, manifests)  # type: ignore[arg-type]
    try:
        step = next(flow)
        while True:
            step = flow.send(step.function())  # type: ignore[union-attr]
    except StopIteration as end:
        tensors = end.value
    moved(latest, new)
    assert {name: tensor[0].item() for name, tensor in tensors.pairs} == {f"w{n}": 1.0 for n in range(FILES)}
