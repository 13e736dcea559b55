# SPDX-License-Identifier: Apache-2.0
"""Which tensor a changed name means."""

import time

import pytest

from vllm_fp8ext.update.contract.name_hints import Hints

Q = "model.layers.3.self_attn.q_proj.weight"
KNOWN = [Q, "model.norm.weight", "visual.blocks.0.norm.weight", "lm_head.weight"]


@pytest.mark.parametrize(
    "name",
    [
        "_fsdp_wrapped_module.model._fsdp_wrapped_module.layers.3._fsdp_wrapped_module.self_attn.q_proj.weight",
        "base_model.model.model.layers.3.self_attn.q_proj.base_layer.weight",
        "model.language_model.layers.3.self_attn.q_proj.weight",
        "language_model.model.layers.3.self_attn.q_proj.weight",
        "layers.3.self_attn.q_proj.weight",
        "_orig_mod.model.layers.3.self_attn.q_proj.weight",
        "module.model.layers.3.self_attn.q_proj.weight",
        "module.model.layers.3._checkpoint_wrapped_module.self_attn.q_proj.weight",
        "actor.model.layers.3.self_attn.q_proj.weight",
    ],
)
def test_wrappers_are_seen_through(name: str) -> None:
    assert Hints(KNOWN).meant(name) == Q


@pytest.mark.parametrize(
    "name", ["", ".", "weight", "q_proj.weight", "model.layers.4.self_attn.q_proj.weight", f"{Q}.lora_A"]
)
def test_what_could_mean_anything_means_nothing(name: str) -> None:
    assert Hints(KNOWN).meant(name) is None
    assert Hints([]).meant(name) is None


def test_what_belongs_to_another_part_of_the_model_is_not_meant() -> None:
    name = "model.vision_tower.layers.3.self_attn.q_proj.weight"
    assert Hints(KNOWN, ["vision_tower.layers.0.self_attn.q_proj.bias"]).meant(name) is None
    assert Hints(KNOWN).meant(f"visual.{Q}") is None


def test_of_two_that_could_be_meant_none_is_told() -> None:
    assert Hints([Q, f"language_model.{Q}"]).meant(f"module.{Q}") is None


@pytest.mark.parametrize(
    "name", ["." * 1_000_000, "model." * 500_000, "a" * 3_000_000, "layers." * 400_000 + Q]
)
def test_names_of_any_length_take_no_time(name: str) -> None:
    hints = Hints(KNOWN)
    start = time.process_time()
    assert hints.meant(name) in (None, Q)
    assert time.process_time() - start < 2.0
