# SPDX-License-Identifier: Apache-2.0
"""Plain attention against torch's own and against a loop in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from vllm_fp8ext.compat.update.shadow_attention import _QUERY_ROWS, causal_attention

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Of values near 1: sums of fewer than 1000 products in float32, then one rounding to the dtype (half a unit in the last
place, doubled)."""


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(
    tokens: int, heads: int, groups: int, size: int, value_size: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        random(tokens, heads, size, seed=1, dtype=dtype),
        random(tokens, groups, size, seed=2, dtype=dtype),
        random(tokens, groups, value_size, seed=3, dtype=dtype),
    )


def naive(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """One query and one head at a time, in float64, by the definition."""
    tokens, heads, _ = query.shape
    repeat = heads // key.shape[1]
    out = torch.zeros(tokens, heads, value.shape[2], dtype=torch.float64)
    for position in range(tokens):
        first = max(0, position + 1 - window) if window else 0
        for head in range(heads):
            keys = key[first : position + 1, head // repeat].double()
            scores = keys @ query[position, head].double() * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            powers = torch.exp(scores)
            total = powers.sum() + (torch.exp(sinks[head].double()) if sinks is not None else 0.0)
            out[position, head] = powers / total @ value[first : position + 1, head // repeat].double()
    return out


@given(
    tokens=st.integers(1, 40),
    groups=st.integers(1, 3),
    repeat=st.integers(1, 3),
    size=st.sampled_from((1, 8, 20)),
    value_size=st.sampled_from((1, 8, 12)),
    window=st.none() | st.integers(1, 45),
    softcap=st.sampled_from((0.0, 0.5, 30.0)),
    sunk=st.booleans(),
    dtype=st.sampled_from(tuple(TOLERANCE)),
)
@settings(max_examples=60)
def test_it_is_attention_by_definition(
    tokens: int,
    groups: int,
    repeat: int,
    size: int,
    value_size: int,
    window: int | None,
    softcap: float,
    sunk: bool,
    dtype: torch.dtype,
) -> None:
    query, key, value = qkv(tokens, groups * repeat, groups, size, value_size, dtype)
    sinks = random(groups * repeat, seed=4, dtype=dtype) if sunk else None
    scale = size**-0.5
    attended = causal_attention(query, key, value, scale=scale, window=window, softcap=softcap, sinks=sinks)
    expected = naive(query, key, value, scale=scale, window=window, softcap=softcap, sinks=sinks)
    assert (attended.shape, attended.dtype) == ((tokens, groups * repeat, value_size), dtype)
    torch.testing.assert_close(attended.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("tokens", [1, _QUERY_ROWS - 1, _QUERY_ROWS, _QUERY_ROWS + 1, 2 * _QUERY_ROWS + 3])
@pytest.mark.parametrize("window", [None, 1, 100, _QUERY_ROWS + 44])
def test_it_is_torchs_attention_at_any_length(tokens: int, window: int | None) -> None:
    """Queries are attended to in pieces: at their borders too."""
    query, key, value = qkv(tokens, 4, 2, 16, 16)
    distances = torch.arange(tokens)[:, None] - torch.arange(tokens)[None, :]
    seen = (distances >= 0) & (distances < (window or tokens))
    expected = scaled_dot_product_attention(
        query.transpose(0, 1),
        key.transpose(0, 1),
        value.transpose(0, 1),
        attn_mask=seen,
        scale=0.2,
        enable_gqa=True,
    )
    attended = causal_attention(query, key, value, scale=0.2, window=window)
    torch.testing.assert_close(attended, expected.transpose(0, 1), rtol=2e-5, atol=2e-5)


def test_what_comes_later_is_not_seen() -> None:
    query, key, value = qkv(_QUERY_ROWS + 50, 2, 1, 8, 8)
    before = causal_attention(query, key, value, scale=0.3)
    for late in (10, _QUERY_ROWS, _QUERY_ROWS + 49):
        changed = [tensor.clone() for tensor in (key, value)]
        for tensor in changed:
            tensor[late] = 100.0
        after = causal_attention(query, *changed, scale=0.3)
        assert torch.equal(after[:late], before[:late])
        assert not torch.equal(after[late], before[late])


def test_a_large_sink_takes_everything() -> None:
    query, key, value = qkv(5, 2, 2, 8, 8)
    attended = causal_attention(query, key, value, scale=0.3, sinks=torch.tensor([50.0, -50.0]))
    plain = causal_attention(query, key, value, scale=0.3)
    assert attended[:, 0].abs().max() < 1e-10
    torch.testing.assert_close(attended[:, 1], plain[:, 1], rtol=0, atol=TOLERANCE[torch.float32])


def test_large_scores_do_not_overflow() -> None:
    query, key, value = qkv(8, 1, 1, 4, 4)
    attended = causal_attention(query * 1e4, key * 1e4, value, scale=1.0)
    assert torch.isfinite(attended).all()
    best = (query[:, 0] @ key[:, 0].T).masked_fill(torch.ones(8, 8).triu(1).bool(), -math.inf).argmax(1)
    torch.testing.assert_close(attended[:, 0], value[best, 0])
