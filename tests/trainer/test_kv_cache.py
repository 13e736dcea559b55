# SPDX-License-Identifier: Apache-2.0
"""A trainer's attention over an FP8 KV cache: codes of the definition, straight-through gradients, errors by layer."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_fp8ext.kernels.attention.kv_cache import dequantize, quantize
from vllm_fp8ext.trainer.kv_cache import Fp8KvAttention

HEADS, TOKENS, WIDTH = 2, 5, 8
SCALES = {"a": {"q": [1.0], "k": [0.5], "v": [0.03]}, "b": {"k": [0.25, 2.0], "v": [0.1, 0.2]}}


def read(
    _: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, *, scaling: float
) -> tuple[Tensor, ...]:
    assert mask is None
    return query * scaling, key, value


def layer(number: int) -> SimpleNamespace:
    return SimpleNamespace(layer_idx=number)


def kv() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    key, value = (torch.randn(3, HEADS, TOKENS, WIDTH, dtype=torch.bfloat16) for _ in range(2))
    return key.requires_grad_(), value.requires_grad_()


@pytest.mark.parametrize("number", [0, 1], ids=["one scale", "one for each head"])
def test_attention_reads_what_the_cache_holds(number: int) -> None:
    attention = Fp8KvAttention(read)
    attention.use(SCALES)
    key, value = kv()
    query, *rounded = attention(layer(number), key, key, value, None, scaling=2.0)
    assert torch.equal(query, key * 2)
    for kind, source, found in zip(("k", "v"), (key, value), rounded, strict=True):
        scales = torch.tensor(list(SCALES.values())[number][kind])
        for sequence, each in zip(source.transpose(1, 2), found.transpose(1, 2), strict=True):
            assert torch.equal(each, dequantize(quantize(sequence, scales), scales).bfloat16())
        assert not torch.equal(found, source)


def test_gradients_go_straight_through() -> None:
    attention = Fp8KvAttention(read)
    attention.use(SCALES)
    key, value = kv()
    _, *rounded = attention(layer(1), key, key, value, None, scaling=2.0)
    (rounded[0].sum() + 3 * rounded[1].sum()).backward()
    assert key.grad is not None
    assert value.grad is not None
    assert bool((key.grad == 1).all())
    assert bool((value.grad == 3).all())


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({}, "expected those of each layer, found none"),
        ({"a": {"k": [1.0]}}, "a: expected positive scales of v, found"),
        (
            {"a": {"k": [0.0], "v": [1.0]}, "b": {"k": [1.0], "v": [float("nan")]}},
            r"a: expected .* of k, found \[0.0\]; b: .* of v, found \[nan\]",
        ),
    ],
    ids=["no layers", "no V", "not positive"],
)
def test_scales_that_cannot_be_are_refused_and_the_others_stay(
    scales: dict[str, dict[str, list[float]]], message: str
) -> None:
    attention = Fp8KvAttention(read)
    attention.use(SCALES)
    with pytest.raises(ValueError, match=message):
        attention.use(scales)
    attention(layer(1), *kv(), kv()[0], None, scaling=1.0)


def test_scales_of_another_model_are_refused() -> None:
    attention = Fp8KvAttention(read)
    with pytest.raises(ValueError, match="layer 0: expected its scales, found those of 0 layers"):
        attention(layer(0), *kv(), kv()[0], None, scaling=1.0)
    attention.use({"a": {"k": [1.0, 1.0, 1.0], "v": [1.0]}})
    with pytest.raises(ValueError, match="layer 0, k: expected 1 scale or 2, found 3"):
        attention(layer(0), *kv(), kv()[0], None, scaling=1.0)
