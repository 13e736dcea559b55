# SPDX-License-Identifier: Apache-2.0
"""Models with parts that no update would reach, and what an update of others brings."""

import pytest
import torch
from torch import nn

from vllm_fp8ext.compat.update.model import checkpoint_specs, require_no_copies
from vllm_fp8ext.errors import ConfigError
from vllm_fp8ext.update.contract.manifest import TensorSpec


class FourierRotaryEmbedding(nn.Module):
    """By the name of vLLM's, which makes its table at the first step."""


class Runner(nn.Module):
    def __init__(self, *, joins: bool) -> None:
        super().__init__()
        self._fse_fuse_gate = joins


def test_what_copies_weights_at_its_first_step_is_refused() -> None:
    require_no_copies(nn.Sequential(nn.Linear(2, 2), Runner(joins=False)))
    with pytest.raises(ConfigError, match="FourierRotaryEmbedding") as refused:
        require_no_copies(nn.Sequential(nn.Sequential(FourierRotaryEmbedding())))
    assert "MoERunner" not in str(refused.value)
    with pytest.raises(ConfigError, match="MoERunner"):
        require_no_copies(nn.Sequential(Runner(joins=True)))


def test_scales_of_a_quantization_are_no_weights_and_others_are() -> None:
    """Gemma 4's routers have scales of their own."""
    scales = ["q_proj.weight_scale_inv", "q_proj.weight_scale", "q_proj.input_scale", "k_proj.output_scale"]
    scales += ["attn.q_scale", "attn.k_scale", "attn.v_scale", "attn.kv_scale", "attn.prob_scale"]
    weights = ["router.per_expert_scale", "router.scale", "layer_scale", "q_proj.weight"]
    recorded = {
        name: TensorSpec(name, (4,), "float8_e4m3fn" if name == "q_proj.weight" else "bfloat16")
        for name in (f"model.layers.0.{name}" for name in (*scales, *weights))
    }
    specs = checkpoint_specs(recorded, torch.bfloat16)
    assert [spec.name.removeprefix("model.layers.0.") for spec in specs] == weights
    assert {spec.dtype for spec in specs} == {"bfloat16"}
