# SPDX-License-Identifier: Apache-2.0
"""Generated checkpoints have the tensors that the model of their shape takes."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from small_shapes import small
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_fp8ext.bench import generated
from vllm_fp8ext.bench.model_shapes import MODEL_SHAPES, tensors_of


@pytest.mark.parametrize("shape", ["tiny", "tiny-experts"])
def test_a_checkpoint_is_what_its_model_takes(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generated, "_SHARD_BYTES", 1 << 20)
    size = generated.write_checkpoint(tmp_path, shape, 0, "cpu")
    collected = {}
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    for file in files:
        with safe_open(file, "pt") as tensors:
            names = tensors.keys()
            collected |= {name: tensors.get_tensor(name) for name in names}
    assert sum(tensor.nbytes for tensor in collected.values()) == size
    for tensor in collected.values():
        assert tensor.dtype == torch.bfloat16
        assert torch.isfinite(tensor).all()
        assert tensor.float().std() > 0
    config = AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(tensor.numel() for tensor in collected.values()) == sum(p.numel() for p in model.parameters())
    for name, parameter in model.state_dict().items():
        if ".experts." not in name:
            assert collected[name].shape == parameter.shape, name
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.state_dict()["model.norm.weight"], collected["model.norm.weight"])
    if hasattr(config, "num_experts"):
        last = collected["model.layers.1.mlp.experts.7.down_proj.weight"]
        assert last.shape == (config.hidden_size, config.moe_intermediate_size)


@pytest.mark.parametrize("name", MODEL_SHAPES)
def test_other_architectures_are_loaded_whole(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers names each tensor that it lacks, or does not know."""
    monkeypatch.setitem(generated.SHAPES, name, small(name))
    generated.write_checkpoint(tmp_path, name, 0, "cpu")
    made = getattr(transformers, MODEL_SHAPES[name]["architecture"])
    model, told = made.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(told.values()), told
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    logits = model(torch.arange(5, 40)[None]).logits
    assert torch.isfinite(logits).all()
    assert logits.std() > 0


def test_shapes_have_as_many_parameters_as_their_models() -> None:
    billions = {"Llama-3.1-8B": 8.0, "Llama-3.2-1B": 1.2, "Qwen2.5-7B": 7.6, "Qwen2.5-VL-7B": 8.3}
    billions |= {"Gemma-3-12B": 11.8, "Qwen3.5-9B": 9.0, "DeepSeek-V2-Lite": 15.7}
    billions |= {"Moonlight-16B-A3B": 16.0, "gpt-oss-20B": 20.9}
    found = {
        name: sum(math.prod(sizes) for _, sizes, _ in tensors_of(generated._config(name))) / 1e9
        for name in MODEL_SHAPES
    }
    assert {name: round(count, 1) for name, count in found.items()} == billions


def test_a_seed_makes_the_same_weights_again(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        generated.write_checkpoint(tmp_path / name, "tiny", seed, "cpu")
    a, b, c = ((tmp_path / name / "model-00000.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_a_checkpoint_that_was_not_finished_is_none(tmp_path: Path) -> None:
    """`checkpoint` would serve it."""
    blocked = tmp_path / "model-00000.safetensors"
    blocked.mkdir()
    with pytest.raises(IsADirectoryError):
        generated.write_checkpoint(tmp_path, "tiny", 0, "cpu")
    assert list(tmp_path.iterdir()) == [blocked]


@pytest.mark.full
def test_a_full_disk_is_an_error(on_a_small_disk: Callable[..., Any]) -> None:
    """Not the end of the process, as it is where pages of a mapped file find no room."""
    write = "import sys, pathlib; from vllm_fp8ext.bench.generated import write_checkpoint as write; "
    write += "write(pathlib.Path(sys.argv[1]), 'tiny', 0, 'cpu')"
    done = on_a_small_disk("1m", write)
    assert done.returncode == 1, done.stderr
    assert "No space left on device" in done.stderr
