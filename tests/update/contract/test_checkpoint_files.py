# SPDX-License-Identifier: Apache-2.0
"""Which files make a checkpoint."""

import json
import os
from pathlib import Path

import pytest

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.safetensors_file import ranges_of
from vllm_fp8ext.update.contract.checkpoint_files import INDEX, INDEX_LIMIT, checkpoint_files
from vllm_fp8ext.update.transports.wire import stored
from vllm_fp8ext.update.worker.digest import checkpoint_digests


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files that the index names, and, as some checkpoints have, the same weights in another form."""
    import torch
    from safetensors.torch import save_file

    names = {"a.weight": "model-1.safetensors", "b.weight": "model-2.safetensors"}
    for name, file in names.items():
        save_file({name: torch.ones(2)}, tmp_path / file)
    save_file({"layers.a": torch.ones(2), "layers.b": torch.ones(2)}, tmp_path / "consolidated.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return tmp_path


def refused(path: Path) -> UpdateError:
    with pytest.raises(UpdateError) as caught:
        checkpoint_files(path)
    return caught.value


def test_an_index_says_which_files(folder: Path) -> None:
    assert [file.name for file in checkpoint_files(folder)] == ["model-1.safetensors", "model-2.safetensors"]
    assert checkpoint_files(folder / "consolidated.safetensors") == [folder / "consolidated.safetensors"]
    (folder / INDEX).unlink()
    assert len(checkpoint_files(folder)) == 3


def test_pipes_are_no_files_of_a_checkpoint(folder: Path) -> None:
    """Whoever opened one would wait for somebody to write to it."""
    os.mkfifo(folder / "model-3.safetensors")
    (folder / INDEX).unlink()
    assert len(checkpoint_files(folder)) == 3


@pytest.mark.parametrize(
    "content", [b"TOPSECRET \xff", b"TOPSECRET", b"[" * 200_000, b'{"weight_map": ["TOPSECRET"]}', b"{}"]
)
def test_what_an_index_holds_that_is_none_is_told_to_nobody(folder: Path, content: bytes) -> None:
    (folder / INDEX).write_bytes(content)
    error = refused(folder)
    assert error.kind == "unreadable"
    assert "expected an object weight_map of file names by tensor" in str(error)
    assert "TOPSECRET" not in str(error)


def test_an_index_is_read_up_to_a_limit(folder: Path) -> None:
    os.truncate(folder / INDEX, INDEX_LIMIT + 1)
    error = refused(folder)
    assert (error.kind, error.status) == ("unreadable", 422)
    assert f"of {INDEX_LIMIT} bytes at most" in str(error)


def test_who_pushes_quantizes_and_digests_reads_the_same_files(folder: Path) -> None:
    names = ["a.weight", "b.weight"]
    assert [part.name for part in ranges_of(folder)] == names
    assert [name for name, _ in stored(folder, "cpu")] == names
    assert list(checkpoint_digests(folder)) == names


def test_a_file_that_the_index_names_must_be_there(folder: Path) -> None:
    (folder / "model-2.safetensors").unlink()
    error = refused(folder)
    assert (error.kind, error.status) == ("not-found", 404)
    assert str(error) == f"{folder / INDEX}: names files that are missing: model-2.safetensors"


def test_of_missing_files_some_are_told_whatever_they_are_called(folder: Path) -> None:
    """An index may be 64 MiB long, and have names that are no text."""
    names = ["\\ud800", "a" * 100_000, *(f"model-{number}" for number in range(20))]
    content = ", ".join(f'"{number}": "{name}"' for number, name in enumerate(names))
    (folder / INDEX).write_text(f'{{"weight_map": {{{content}}}}}')
    error = refused(folder)
    assert str(error).endswith(" and 14 more")
    assert len(str(error).encode()) < 1000


def test_a_path_that_is_too_long_is_not_found(tmp_path: Path) -> None:
    error = refused(tmp_path / ("x" * 256))
    assert (error.kind, error.status) == ("not-found", 404)


def test_a_link_is_resolved_once(folder: Path, tmp_path: Path) -> None:
    link = tmp_path / "latest"
    link.symlink_to(folder)
    files = checkpoint_files(link)
    link.unlink()
    assert all(file.is_file() for file in files)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "\xff"]
)
def test_an_index_that_is_none(folder: Path, content: str) -> None:
    (folder / INDEX).write_text(content, "latin-1")
    error = refused(folder)
    expected = (
        ("not-found", "missing: 1") if "1" in content else ("unreadable", "expected an object weight_map")
    )
    assert error.kind == expected[0]
    assert expected[1] in str(error)


@pytest.mark.parametrize("name", ["missing", "missing.safetensors", "."])
def test_nothing_is_not_found(tmp_path: Path, name: str) -> None:
    assert (refused(tmp_path / name).kind, refused(tmp_path / name).status) == ("not-found", 404)
