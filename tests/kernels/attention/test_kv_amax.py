# SPDX-License-Identifier: Apache-2.0
"""Largest magnitudes of K, V and Q: sums over steps, and the kernel against the reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_fp8ext.kernels.attention.kv_amax import AmaxCounts, AmaxTally, K, Q, V
from vllm_fp8ext.kernels.numerics.reference import FP8_DTYPE

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Triple = tuple[Tensor, Tensor, Tensor]


def values(tokens: int, heads: int, width: int, kind: str, dtype: torch.dtype, seed: int) -> Tensor:
    noise = torch.Generator().manual_seed(seed)
    result = torch.randn(tokens, heads, width, generator=noise)
    if kind == "heavy":
        result *= torch.exp(2 * torch.randn(tokens, heads, width, generator=noise))
    if kind == "zeros":
        result *= -0.0
    if kind == "edge":
        result = result.sign() * 448 * torch.randint(0, 3, result.shape, generator=noise) / 2
    limit = 448 if dtype == FP8_DTYPE else torch.finfo(dtype).max
    return result.clamp(-limit, limit).to(dtype)


def one(tally: AmaxTally, k: Tensor, v: Tensor, q: Tensor, slots: Tensor, scale: float = 1.0) -> None:
    tally.add((k, v, q), slots, (torch.tensor(scale),) * 3)


def test_steps_are_gathered_until_they_are_taken() -> None:
    tally = AmaxTally(2, torch.device("cpu"))
    steps = [
        [values(5, 2, width, "heavy", torch.bfloat16, seed + side) for side, width in enumerate((8, 4, 24))]
        for seed in (0, 10)
    ]
    for step in steps:
        one(tally, *step, torch.arange(5), 0.01)
    seen = tally.take()
    for side in (K, V, Q):
        both = torch.cat([step[side] for step in steps]).float().abs()
        assert torch.equal(seen.amax[side], both.amax(dim=(0, 2)))
        limit = torch.tensor(0.01) * 448
        assert torch.equal(seen.saturated[side], (both > limit).sum(dim=(0, 2)))
        assert seen.saturated[side].min() > 0
    assert seen.elements.tolist() == [80, 40, 240]
    again = tally.take()
    assert not again.amax.any()
    assert not again.saturated.any()
    assert not again.elements.any()


def test_padding_is_not_seen() -> None:
    """Neither negative slots nor tokens beyond the slots, whatever they hold."""
    k = torch.full((6, 1, 4), float("nan"))
    k[[0, 2]] = 3.0
    tally = AmaxTally(1, torch.device("cpu"))
    one(tally, k, k, k, torch.tensor([7, -1, 0, -1]))
    seen = tally.take()
    assert seen.amax.tolist() == [[3.0]] * 3
    assert seen.elements.tolist() == [8] * 3


def test_padding_alone_is_nothing() -> None:
    tally = AmaxTally(1, torch.device("cpu"))
    ones = torch.ones(3, 1, 4)
    one(tally, ones, ones, ones, torch.full((3,), -1))
    seen = tally.take()
    assert (seen.amax.any(), seen.elements.any()) == (torch.tensor(False), torch.tensor(False))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_visible(value: float) -> None:
    tally = AmaxTally(2, torch.device("cpu"))
    bad, good = torch.ones(3, 2, 4), torch.ones(3, 2, 4)
    bad[1, 1, 2] = value
    one(tally, good, bad, good, torch.arange(3))
    one(tally, good, good, good, torch.arange(3))
    seen = tally.take()
    assert torch.isfinite(seen.amax).tolist() == [[True, True], [True, False], [True, True]]
    assert seen.saturated.tolist() == [[0, 0], [0, 1], [0, 0]]


def test_a_quantized_query_at_the_end_of_its_range_grows() -> None:
    tally, k = AmaxTally(2, torch.device("cpu")), torch.ones(1, 2, 4)
    q = torch.tensor([[[1.0, -448, 448, 2], [1, -416, 4, 2]]]).to(FP8_DTYPE)
    tally.add((k, k, q), torch.zeros(1), (torch.tensor(1.0), torch.tensor(1.0), torch.tensor([0.5, 0.25])))
    seen = tally.take()
    assert seen.amax[Q].tolist() == [448.0, 104.0]
    assert seen.saturated[Q].tolist() == [2, 0]


def assert_same(actual: AmaxCounts, expected: AmaxCounts) -> None:
    """NaN and infinity of one head may hide each other."""
    finite = torch.isfinite(expected.amax)
    assert torch.equal(torch.isfinite(actual.amax), finite)
    assert torch.equal(actual.amax[finite], expected.amax[finite])
    assert torch.equal(actual.saturated, expected.saturated)
    assert torch.equal(actual.elements, expected.elements)


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[Triple, Tensor, Triple]]:
    """Steps of one layer, as views into the outputs of a fused projection."""
    heads, repeat, width, v_width = (
        draw(st.sampled_from(sizes)) for sizes in ((1, 2, 3), (1, 3), (16, 80), (16, 24))
    )
    dtype, q_dtype = draw(st.sampled_from(DTYPES)), draw(st.sampled_from((*DTYPES, FP8_DTYPE)))
    per_head = draw(st.booleans())
    collected = []
    for seed in range(draw(st.integers(1, 2))):
        tokens = draw(st.sampled_from((1, 2, 31, 32, 33, 70)))
        kind = draw(st.sampled_from(("normal", "heavy", "zeros", "edge")))
        total = heads * (width + v_width)
        fused = values(tokens, 1, total + 3, kind, dtype, seed).squeeze(1)[:, :total]
        k = fused[:, : heads * width].view(tokens, heads, width)
        v = fused[:, heads * width :].view(tokens, heads, v_width)
        q = values(tokens, heads, repeat * width, kind, q_dtype, seed + 9)
        if draw(st.booleans()) and kind != "zeros":
            k[tokens // 2, heads - 1, 3] = draw(st.sampled_from((float("nan"), float("-inf"))))
        noise = torch.Generator().manual_seed(seed)
        slots = torch.randint(-1, 3, (tokens - draw(st.integers(0, tokens - 1)),), generator=noise)
        count = heads if per_head else 1
        scales = tuple(torch.rand(count, generator=noise) * 0.01 + 1e-3 for _ in range(3))
        collected.append(((k, v, q), slots, scales))
    return collected


def assert_kernel_is_reference(device: str, steps: list[tuple[Triple, Tensor, Triple]]) -> None:
    pytest.importorskip("triton", reason="needs Triton, which the CPU build does not bring")
    from vllm_fp8ext.kernels.attention import kv_amax_triton

    heads = steps[0][0][0].shape[1]
    expected = AmaxTally(heads, torch.device("cpu"))
    tally = AmaxTally(heads, torch.device(device))
    if device == "cpu":  # several programs there, too
        tally.amax_3GP, tally.saturated_3GP = (
            part.repeat(1, 1, 3) for part in (tally.amax_3GP, tally.saturated_3GP)
        )
        tally.tokens_P = tally.tokens_P.repeat(3)
    for triple, slots, scales in steps:
        expected.add(triple, slots, scales)
        tally._widths = expected._widths
        here = tuple(_like(part, device) for part in triple)
        kv_amax_triton.launch(tally, here, slots.to(device), tuple(scale.to(device) for scale in scales))
    assert_same(tally.take(), expected.take())


@pytest.mark.parametrize("examples", [8, pytest.param(30, marks=pytest.mark.full)])
def test_the_kernel_is_the_reference(device: str, examples: int) -> None:
    @given(steps())
    @settings(max_examples=examples)
    def is_it(steps: list[tuple[Triple, Tensor, Triple]]) -> None:
        assert_kernel_is_reference(device, steps)

    is_it()


@pytest.mark.parametrize("tokens", [95, 97, 300])
def test_each_program_takes_several_tiles(device: str, tokens: int) -> None:
    """Every token, and each once."""
    step = tuple(values(tokens, 2, width, "normal", torch.bfloat16, 0) for width in (128, 128, 256))
    assert_kernel_is_reference(device, [(step, torch.arange(tokens), (torch.tensor(1e-3),) * 3)])


def test_a_head_of_k_may_have_many_queries(device: str) -> None:
    """71 of 64, in multi-query attention: more than a program reads at a time."""
    step = tuple(values(5, 1, width, "normal", torch.bfloat16, 0) for width in (64, 64, 71 * 64))
    assert_kernel_is_reference(device, [(step, torch.arange(5), (torch.tensor(1e-3),) * 3)])


def _like(part: Tensor, device: str) -> Tensor:
    """On the device, with the same strides."""
    if device == "cpu":
        return part
    size = sum((n - 1) * step for n, step in zip(part.shape, part.stride(), strict=True)) + 1
    return part.as_strided((size,), (1,)).to(device).as_strided(part.shape, part.stride())
