# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with a tensor in two files, read by vLLM's own loader."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from vllm.config import LoadConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from vllm_fp8ext.compat.update.repeated_tensors import no_tensor_twice
from vllm_fp8ext.errors import ConfigError
from vllm_fp8ext.update.contract.checkpoint_files import INDEX


def checkpoint(folder: Path, files: dict[str, tuple[str, ...]], index: dict[str, str] | None) -> Path:
    for number, (file, names) in enumerate(files.items()):
        save_file({name: torch.full((2,), float(number)) for name in names}, folder / file)
    if index is not None:
        (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    return folder


def read(folder: Path) -> dict[str, float]:
    """What a model is given, later tensors in place of earlier ones."""
    of: Any = SimpleNamespace(model=str(folder), revision=None)
    result = DefaultModelLoader(LoadConfig()).get_all_weights(of, nn.Module())
    return {name: float(tensor[0]) for name, tensor in result}


STALE = {"1.safetensors": ("a", "b"), "2.safetensors": ("b", "c")}


@pytest.mark.parametrize("index", [{"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"}, None])
def test_a_stale_copy_is_refused(tmp_path: Path, index: dict[str, str] | None) -> None:
    """vLLM alone gives the model the copy that it reads last."""
    folder = checkpoint(tmp_path, STALE, index)
    assert read(folder)["b"] == 1.0
    original = DefaultModelLoader.get_all_weights
    with pytest.raises(ConfigError) as refused, no_tensor_twice():
        read(folder)
    assert f"{folder}: expected each tensor once, found 1 in more than one file" in str(refused.value)
    assert str(refused.value).endswith("\n  b (1.safetensors, 2.safetensors)")
    assert DefaultModelLoader.get_all_weights is original


def test_files_that_the_index_does_not_name_may_have_anything(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, STALE, {"a": "1.safetensors", "b": "1.safetensors"})
    with no_tensor_twice():
        assert read(folder) == {"a": 0.0, "b": 0.0}


def test_two_models_may_be_read_from_one_checkpoint(tmp_path: Path) -> None:
    """A draft model, say."""
    folder = checkpoint(tmp_path, {"model.safetensors": ("a",)}, None)
    with no_tensor_twice():
        assert read(folder) == read(folder)


def test_of_many_copies_some_are_told(tmp_path: Path) -> None:
    names = tuple(f"layers.{number:02}.weight" for number in range(30))
    folder = checkpoint(tmp_path, {"1.safetensors": names, "2.safetensors": names}, None)
    with pytest.raises(ConfigError, match="found 30 in more than one file") as refused, no_tensor_twice():
        read(folder)
    assert "layers.19" in str(refused.value)
    assert str(refused.value).endswith("and 10 more")


def test_copies_are_told_of_when_they_stop_the_loading(tmp_path: Path) -> None:
    """Quantized layers refuse a second copy in words of their own."""
    folder = checkpoint(tmp_path, STALE, None)

    def fail() -> None:
        assert read(folder) is None

    with pytest.raises(ConfigError, match="found 1 in more than one file") as refused, no_tensor_twice():
        fail()
    assert isinstance(refused.value.__cause__, AssertionError)


def test_what_stops_the_loading_of_a_good_checkpoint_is_told(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, {"1.safetensors": ("a",)}, None)
    with pytest.raises(AssertionError), no_tensor_twice():
        assert read(folder) is None
