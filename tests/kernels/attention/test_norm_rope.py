# SPDX-License-Identifier: Apache-2.0
"""Norm, rotary embedding and quantization of queries in one launch against the reference, bit for bit.

Sums of squares depend on their order, so inputs are small integers times a power of two, as in the test of the fused norm.
"""

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_fp8ext.kernels.testing import hard_cases, kernel_cases

pytest.importorskip("triton", reason="needs Triton, which the CPU build does not bring")
from vllm_fp8ext.kernels.attention.norm_rope import NormWeights, norm_rope, norm_rope_reference
from vllm_fp8ext.kernels.attention.position_sections import PositionSections

POSITIONS = 64
SECTIONS = ("none", "sections", "interleaved")


def cos_sin(size: int, dtype: torch.dtype) -> Tensor:
    """As vLLM keeps it."""
    frequencies = 1e4 ** -(torch.arange(0, size, 2) / size)
    angles = torch.outer(torch.arange(POSITIONS), frequencies)
    return torch.cat((angles.cos(), angles.sin()), -1).to(dtype)


def sections_of(kind: str, size: int) -> PositionSections | None:
    """As Qwen2.5-VL (16, 24, 24) and Qwen3-VL (24, 20, 20) have them for heads of 128."""
    if kind == "none":
        return None
    time, height = (size // 8, size * 3 // 16) if kind == "sections" else (size * 3 // 16, size * 5 // 32)
    return PositionSections(time, height, size // 2 - time - height, kind == "interleaved")


def on(device: str, value: Any) -> Any:
    if isinstance(value, NormWeights):
        return NormWeights(value.query_D.to(device), value.key_D.to(device), value.epsilon)
    return value.to(device) if isinstance(value, Tensor) else value


@given(
    st.integers(1, 4),
    st.sampled_from(((1, 1), (4, 1), (8, 2), (5, 5), (12, 4), (32, 8))),
    st.sampled_from((64, 128, 256)),
    st.integers(-8, 4),
    st.booleans(),
    st.sampled_from(("none", "one", "per head")),
    st.sampled_from((torch.bfloat16, torch.float16)),
    st.sampled_from(SECTIONS),
    st.integers(0, 2**32 - 4),
)
@example(1, (4, 1), 128, 0, True, "none", torch.bfloat16, "none", 0)
@example(3, (32, 8), 128, 0, True, "per head", torch.bfloat16, "none", 0)
@example(2, (12, 4), 64, 4, False, "one", torch.float16, "none", 0)
@example(3, (28, 4), 128, 0, False, "one", torch.bfloat16, "sections", 0)
@example(3, (32, 8), 128, 0, True, "per head", torch.bfloat16, "interleaved", 0)
@settings(max_examples=40)
def test_everything_is_the_references(
    device: str,
    m: int,
    heads: tuple[int, int],
    size: int,
    exponent: int,
    normed: bool,
    scaled: str,
    dtype: torch.dtype,
    kind: str,
    seed: int,
) -> None:
    columns = (heads[0] + 2 * heads[1]) * size
    qkv = hard_cases.integers(m, columns, exponent=exponent, dtype=dtype, seed=seed)
    noise = torch.Generator().manual_seed(seed + 1)
    sections = sections_of(kind, size)
    positions = torch.randint(POSITIONS, (m,), generator=noise)
    if sections is not None:  # rows of a wider buffer
        positions = torch.randint(POSITIONS, (3, m + 3), generator=noise)[:, :m]
    weights = hard_cases.awkward(2, size, "normal", dtype, seed).clamp(-500, 500)
    norms = NormWeights(weights[0], weights[1], 1e-6) if normed else None
    scale = {
        "none": None,
        "one": torch.tensor(0.03),
        "per head": torch.rand(heads[1], generator=noise) * 0.1 + 1e-3,
    }[scaled]
    arguments = (qkv, positions, cos_sin(size, dtype), norms, scale, *heads, sections)
    outputs = norm_rope(*(on(device, value) for value in arguments))
    expected = norm_rope_reference(*arguments)
    assert [kernel_cases.same(a, b) for a, b in zip(outputs, expected, strict=True)] == [True, True]


@pytest.mark.parametrize("kind", SECTIONS[1:])
def test_three_positions_turn_as_in_vllm(kind: str) -> None:
    """vLLM's layer in fp32, rounded once. Three equal positions of text turn as one does."""
    pytest.importorskip("vllm", reason="compares with vLLM's layer")
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding

    size, sections = 128, sections_of(kind, 128)
    assert sections is not None
    *split, interleaved = sections
    with set_current_vllm_config(VllmConfig()):
        layer = MRotaryEmbedding(size, size, 16, 1e4, True, torch.bfloat16, split, interleaved)
    qkv = hard_cases.integers(5, 6 * size, exponent=0, dtype=torch.bfloat16, seed=1)
    table = layer.cos_sin_cache
    places = torch.randint(POSITIONS, (3, 5), generator=torch.Generator().manual_seed(2))
    query, key = norm_rope_reference(qkv, places, table, None, None, 4, 1, sections)
    expected = layer.forward_native(places, qkv[:, : 4 * size].float(), qkv[:, 4 * size : 5 * size].float())
    assert kernel_cases.same(query.flatten(1), expected[0].bfloat16())
    assert kernel_cases.same(key.flatten(1), expected[1].bfloat16())
    text = norm_rope_reference(qkv, places[:1].expand(3, -1), table, None, None, 4, 1, sections)
    one = norm_rope_reference(qkv, places[0], table, None, None, 4, 1)
    assert [kernel_cases.same(a, b) for a, b in zip(text, one, strict=True)] == [True, True]


def test_rows_further_apart_and_no_tokens(device: str) -> None:
    wide = hard_cases.integers(3, 6 * 64 + 48, exponent=0, dtype=torch.bfloat16, seed=3).to(device)
    qkv, table = wide[:, : 6 * 64], cos_sin(64, torch.bfloat16)
    positions = torch.tensor([5, 0, 63])
    outputs = norm_rope(qkv, positions.to(device), table.to(device), None, None, 4, 1)
    expected = norm_rope_reference(qkv.cpu(), positions, table, None, None, 4, 1)
    assert [kernel_cases.same(a, b) for a, b in zip(outputs, expected, strict=True)] == [True, True]
    query, key = norm_rope(qkv[:0], positions[:0].to(device), table.to(device), None, None, 4, 1)
    assert (query.shape, key.shape) == ((0, 4, 64), (0, 1, 64))


def test_what_is_not_a_number_stays_none_and_large_queries_saturate(device: str) -> None:
    qkv = torch.zeros(2, 3 * 64, dtype=torch.bfloat16)
    qkv[0, 0], qkv[1, 1] = torch.nan, 3e38
    arguments = (qkv, torch.tensor([0, 0]), cos_sin(64, torch.bfloat16), None, torch.tensor(1.0), 1, 1)
    query, _ = norm_rope(*(on(device, value) for value in arguments))
    assert query.float()[0, 0, 0].isnan()
    assert query.float()[1, 0, 1] == 448
