# SPDX-License-Identifier: Apache-2.0
"""Names that a checkpoint's tensors have in vLLM's mappers and in transformers' models."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from vllm.model_executor.models.utils import WeightsMapper

from vllm_fp8ext.compat.update.weight_names import names_in_transformers, names_of_mapper
from vllm_fp8ext.update.contract.fused import fused_experts

sys.path.insert(0, str(Path(__file__).parents[2] / "e2e"))
from families import FAMILIES

MAPPERS = {
    "qwen2_5_vl": {
        "model.language_model.": "language_model.model.",
        "model.visual.": "visual.",
        "lm_head.": "language_model.lm_head.",
        "model.": "language_model.model.",
    },
    "gemma3": {
        "model.language_model.": "language_model.model.",
        "model.vision_tower.": "vision_tower.",
        "model.multi_modal_projector.": "multi_modal_projector.",
        "lm_head.": "language_model.lm_head.",
    },
}
"""Prefixes, as in vLLM's models of these names."""


class Mapped(nn.Module):
    def __init__(self, **rules: Any) -> None:
        super().__init__()
        self.hf_to_vllm_mapper = WeightsMapper(**rules)


def names_and_checkpoint(family: str, folder: Path) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Configuration, the model's own tensors, and those of its checkpoint."""
    with torch.device("cpu"):
        model = FAMILIES[family]()
    model.save_pretrained(folder)
    return model.config, model.state_dict(), load_file(folder / "model.safetensors")


@pytest.mark.parametrize("family", MAPPERS)
def test_a_mapper_takes_names_of_checkpoints_and_of_transformers(family: str, tmp_path: Path) -> None:
    _, own, stored = names_and_checkpoint(family, tmp_path)
    model = Mapped(orig_to_new_prefix=MAPPERS[family])
    names = names_of_mapper(model, stored)
    renamed = {
        name for name in own if name not in stored and not name.startswith(("model.vision_tower", "lm_head"))
    }
    assert renamed
    assert renamed <= names.keys()
    assert all(names[name] in stored for name in renamed)
    back = names_of_mapper(model, own)  # from a checkpoint in transformers' names
    assert all(back[names[name]] == name for name in renamed if names[name] in back)
    assert {names[name] for name in renamed} <= back.keys()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "paligemma", "mixtral"])
def test_transformers_names_are_those_of_its_model(family: str, tmp_path: Path) -> None:
    config, own, stored = names_and_checkpoint(family, tmp_path)
    config.architectures = [type(FAMILIES[family]()).__name__]
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    shapes |= {name: whole.shape for name, whole in fused_experts(shapes).items()}
    names = names_in_transformers(config, shapes)
    tied = {"lm_head.weight"} if "lm_head.weight" not in stored else set()
    assert names.keys() == own.keys() - stored.keys() - tied
    for name, known in names.items():
        if known in stored:
            assert torch.equal(own[name], stored[known]), name


def test_names_that_transformers_keeps_cost_no_model() -> None:
    class Config:
        architectures = ("Qwen3ForCausalLM",)
        model_type = "qwen3"

    assert names_in_transformers(Config(), {"model.norm.weight": (4,)}) == {}


def test_a_model_that_transformers_does_not_have_has_no_other_names() -> None:
    class Config:
        architectures = ("UnheardOf",)
        model_type = "mixtral"

    assert names_in_transformers(Config(), {"model.norm.weight": (4,)}) == {}


def test_a_part_of_a_name_is_undone_too() -> None:
    model = Mapped(
        orig_to_new_substr={".gate_proj.": ".w1.", "rotary.": None}, orig_to_new_prefix={"a.": "b."}
    )
    names = names_of_mapper(model, ["b.experts.0.w1.weight"])
    assert names == {
        "a.experts.0.w1.weight": "b.experts.0.w1.weight",
        "a.experts.0.gate_proj.weight": "b.experts.0.w1.weight",
        "b.experts.0.gate_proj.weight": "b.experts.0.w1.weight",
    }


def test_a_name_that_could_be_two_tensors_is_none() -> None:
    model = Mapped(orig_to_new_prefix={"a.": "x.", "b.": "x."})
    assert names_of_mapper(model, ["a.w", "b.w"]) == {}


def test_a_model_without_a_mapper_has_no_other_names() -> None:
    assert names_of_mapper(nn.Module(), ["a.w"]) == {}
