# SPDX-License-Identifier: Apache-2.0
"""Which files make a checkpoint."""

import json
from pathlib import Path

import pytest

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.safetensors_file import ranges_of
from vllm_fp8ext.weights.checkpoint_files import INDEX, checkpoint_files
from vllm_fp8ext.weights.digest import checkpoint_digests
from vllm_fp8ext.weights.wire import stored


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
