# SPDX-License-Identifier: Apache-2.0
"""Scales that a trainer computes are those that the server computes from the same K and V."""

import pytest
import torch
from transformers import Qwen3ForCausalLM

from vllm_fp8ext.checkpoints import LATE, problems
from vllm_fp8ext.kv_settings import KvScaleSettings
from vllm_fp8ext.kv_trainer import CachedKV, cached_kv, scales_of
from vllm_fp8ext.update.worker.kv_observer import KvObserver
from vllm_fp8ext.update.worker.kv_scales import computed

LAYERS = [f"model.layers.{index}.self_attn.attn" for index in range(3)]
PROMPTS = [[3 + int(digit) for digit in f"{problem.a}{problem.b}"] for problem in problems(4)]


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM.from_pretrained(LATE, dtype=torch.float32)


@pytest.fixture(scope="module")
def cached(model: Qwen3ForCausalLM) -> CachedKV:
    return cached_kv(model, PROMPTS)


def test_what_is_cached_is_what_attention_reads(model: Qwen3ForCausalLM, cached: CachedKV):
    """K of the first layer, worked out by hand: normed and turned."""
    layer, rotary = model.model.layers[0], model.model.rotary_emb
    expected = []
    with torch.no_grad():
        for prompt in PROMPTS:
            hidden = layer.input_layernorm(model.model.embed_tokens(torch.tensor([prompt])))
            key = layer.self_attn.k_norm(layer.self_attn.k_proj(hidden).view(len(prompt), 2, 64))
            cos, sin = (part[0][:, None] for part in rotary(key, torch.arange(len(prompt))[None]))
            first, second = key.chunk(2, -1)
            expected.append(key * cos + torch.cat([-second, first], -1) * sin)
    torch.testing.assert_close(cached[0][0], torch.cat(expected), rtol=1e-4, atol=1e-4)
    assert len(cached) == 3
    assert all(part.shape == (sum(map(len, PROMPTS)), 2, 64) for parts in cached for part in parts)


@pytest.mark.parametrize("granularity", ["layer", "head"])
@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
def test_the_server_says_the_same(cached: CachedKV, granularity: str, scale_format: str):
    settings = KvScaleSettings(
        policy="calibrate", granularity=granularity, scale_format=scale_format, margin=0.5
    )
    observer = KvObserver(per_head=granularity == "head")
    for layer, (key, value) in zip(LAYERS, cached, strict=True):
        observer.see(layer, key.repeat_interleave(2, 1), key, value)
    heads = 2 if granularity == "head" else 1
    served = {layer: {kind: [1.0] * heads for kind in "kv"} for layer in LAYERS}
    theirs = computed(observer.amax(lambda _, values: [*values]), served, settings)
    own = scales_of(cached, LAYERS, granularity=granularity, margin=0.5, scale_format=scale_format)
    assert own == theirs
    assert len({value for kinds in own.values() for values in kinds.values() for value in values}) > 1


def test_nothing_is_known_of_zeros():
    zeros = torch.zeros(3, 2, 4)
    assert scales_of([(zeros, zeros)], ["a"], granularity="head") == {"a": {"k": [1.0, 1.0], "v": [1.0, 1.0]}}


def test_as_many_names_as_layers(cached: CachedKV):
    with pytest.raises(ValueError, match="longer"):
        scales_of(cached, LAYERS[:2])
