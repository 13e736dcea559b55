# SPDX-License-Identifier: Apache-2.0
"""What becomes of models some of whose layers the shadow can't compute."""

import logging
from typing import Any

import pytest
from torch import nn
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.mamba_mixer import MambaMixer
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.short_conv import ShortConv

from vllm_fp8ext.compat.update.shadow_attention import layers_without_forward
from vllm_fp8ext.compat.update.untried_layers import STAGES, untried_layers
from vllm_fp8ext.config import Settings
from vllm_fp8ext.errors import ConfigError


class Layer(nn.Module, AttentionLayerBase):
    """A layer with a cache of its own, of a class that nobody knows."""

    get_attn_backend: Any = None
    get_kv_cache_spec: Any = None


def bare(kind: type[nn.Module]) -> nn.Module:
    """A module of a class of vLLM's, without what it is made of."""
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    return module


MODEL = nn.ModuleList([Layer(), bare(MambaMixer), bare(MambaMixer2), bare(ShortConv), nn.Linear(1, 1)])


def settings(**section: Any) -> Settings:
    return Settings.parse({"fp8ext": section})


def test_layers_are_known_by_their_class() -> None:
    assert layers_without_forward(MODEL) == ["Layer", "MambaMixer"]
    assert layers_without_forward(nn.ModuleList([bare(MambaMixer2)])) == []


def test_the_log_says_that_tensors_must_be_finite(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "vllm.fp8ext"):
        assert untried_layers(MODEL, settings()) == ("Layer", "MambaMixer")
        assert untried_layers(nn.Linear(1, 1), settings(untried_layers="refuse")) == ()
    assert [record.getMessage().partition(".")[0] for record in caplog.records] == [
        "blockfp8: no canary: this model has layers that can't be computed beside the engine (Layer, MambaMixer)"
    ]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"untried_layers": "refuse"}, "does not serve models with Layer, MambaMixer yet"),
        (
            {"canary": {"prompts": [[1, 2]]}},
            "canary: no prompt runs through new weights of models with Layer",
        ),
        ({"kv_scales": "calibrate"}, "kv_scales calibrate: no prompt runs through new weights"),
    ],
)
def test_what_only_prompts_can_tell_is_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        untried_layers(MODEL, settings(**section))


def test_static_scales_need_no_prompt() -> None:
    assert untried_layers(MODEL, settings(kv_scales={"policy": "static", "default": 1.0}))


def test_stages_meet_in_steps_alone() -> None:
    model = nn.Linear(1, 1)
    assert untried_layers(model, settings(), stages=2) == (STAGES,)
    with pytest.raises(
        ConfigError, match="of models with layers on other pipeline stages; expected no canary"
    ):
        untried_layers(model, settings(kv_scales="calibrate"), stages=2)
