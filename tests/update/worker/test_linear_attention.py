# SPDX-License-Identifier: Apache-2.0
"""Linear attention in chunks against its definition, one token at a time in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_fp8ext.update.worker.linear_attention import CHUNK, causal_conv, gated_delta_rule, selective_scan

TOKENS = st.sampled_from((1, 2, 17, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5))


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


ROUNDED = 1e-5
"""Relative error of sums of some thousand products in fp32, each of which is rounded by 2^-24."""


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def delta_rule_by_token(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor) -> Tensor:
    tokens, heads, size = value.shape
    repeat, depth = heads // key.shape[1], key.shape[2]
    query, key, value, decay, rate = (part.double() for part in (query, key, value, decay, rate))
    out = torch.zeros(tokens, heads, size, dtype=torch.float64)
    for head in range(heads):
        state = torch.zeros(depth, size, dtype=torch.float64)
        for token in range(tokens):
            k, q = key[token, head // repeat], query[token, head // repeat]
            k, q = k / k.norm(), q / q.norm() / depth**0.5
            state = state * decay[token, head].exp()
            state = state + torch.outer(k, rate[token, head] * (value[token, head] - k @ state))
            out[token, head] = q @ state
    return out


def scan_by_token(
    inputs: Tensor, step: Tensor, rate: Tensor, key: Tensor, query: Tensor, skip: Tensor
) -> Tensor:
    tokens, heads, size = inputs.shape
    repeat = heads // key.shape[1]
    inputs, step, rate, key, query, skip = (part.double() for part in (inputs, step, rate, key, query, skip))
    out = torch.zeros(tokens, heads, size, dtype=torch.float64)
    for head in range(heads):
        state = torch.zeros(key.shape[2], size, dtype=torch.float64)
        for token in range(tokens):
            here = inputs[token, head]
            state = state * (step[token, head] * rate[head]).exp()
            state = state + step[token, head] * torch.outer(key[token, head // repeat], here)
            out[token, head] = query[token, head // repeat] @ state + skip[head] * here
    return out


@given(tokens=TOKENS, groups=st.integers(1, 2), repeat=st.integers(1, 2), seed=st.integers(0, 99))
@settings(max_examples=25)
def test_the_gated_delta_rule_is_its_definition(tokens: int, groups: int, repeat: int, seed: int) -> None:
    heads = groups * repeat
    query, key = (random(tokens, groups, 16, seed=seed + n) for n in (0, 1))
    value = random(tokens, heads, 8, seed=seed + 2)
    decay = -torch.nn.functional.softplus(random(tokens, heads, seed=seed + 3))
    rate = random(tokens, heads, seed=seed + 4).sigmoid()
    expected = delta_rule_by_token(query, key, value, decay, rate)
    found = gated_delta_rule(query, key, value, decay, rate)
    assert error(found, expected) < ROUNDED


def test_the_delta_rule_holds_for_tokens_that_repeat() -> None:
    """Equal keys that nothing forgets: the worst case of the triangular system."""
    tokens = 2 * CHUNK
    query = key = torch.ones(tokens, 1, 16)
    value, decay = random(tokens, 1, 8, seed=0), torch.zeros(tokens, 1)
    rate = torch.full((tokens, 1), 0.999)
    expected = delta_rule_by_token(query, key, value, decay, rate)
    found = gated_delta_rule(query, key, value, decay, rate)
    assert error(found, expected) < ROUNDED


@given(tokens=TOKENS, groups=st.integers(1, 2), repeat=st.integers(1, 2), seed=st.integers(0, 99))
@settings(max_examples=25)
def test_the_selective_scan_is_its_definition(tokens: int, groups: int, repeat: int, seed: int) -> None:
    heads = groups * repeat
    inputs = random(tokens, heads, 8, seed=seed)
    step = torch.nn.functional.softplus(random(tokens, heads, seed=seed + 1))
    rate, skip = -random(heads, seed=seed + 2).exp(), random(heads, seed=seed + 3)
    key, query = (random(tokens, groups, 16, seed=seed + n) for n in (4, 5))
    expected = scan_by_token(inputs, step, rate, key, query, skip)
    found = selective_scan(inputs, step, rate, key, query, skip)
    assert error(found, expected) < ROUNDED


def test_decays_that_underflow_stay_finite() -> None:
    tokens = CHUNK + 3
    inputs = torch.ones(tokens, 1, 2)
    step = torch.full((tokens, 1), 1e4)
    found = selective_scan(
        inputs, step, -torch.ones(1), torch.ones(tokens, 1, 4), torch.ones(tokens, 1, 4), None
    )
    torch.testing.assert_close(found, torch.full((tokens, 1, 2), 4e4))


def test_what_is_not_finite_is_not_hidden() -> None:
    parts = [random(70, 1, 8, seed=seed) for seed in range(3)]
    parts[2][69, 0, 3] = torch.nan
    out = gated_delta_rule(*parts, -torch.ones(70, 1), torch.full((70, 1), 0.5))
    assert not torch.isfinite(out[69]).all()
    assert torch.isfinite(out[:64]).all()


@pytest.mark.parametrize("tokens", [1, 3, 9])
@pytest.mark.parametrize("activation", ["silu", None])
def test_the_convolution_sees_its_last_tokens(tokens: int, activation: str | None) -> None:
    inputs, weight, bias = random(tokens, 5, seed=0), random(5, 4, seed=1), random(5, seed=2)
    expected = bias.repeat(tokens, 1)
    for token in range(tokens):
        for back in range(min(token + 1, 4)):
            expected[token] += inputs[token - back] * weight[:, 3 - back]
    if activation:
        expected = torch.nn.functional.silu(expected)
    torch.testing.assert_close(causal_conv(inputs, weight, bias, activation), expected)


def test_an_unknown_activation_is_an_error() -> None:
    with pytest.raises(ValueError, match="expected the activation silu, swish or none, found relu"):
        causal_conv(torch.ones(2, 3), torch.ones(3, 4), None, "relu")
