# SPDX-License-Identifier: Apache-2.0
"""Scales, codes and fit of the FP8 KV cache, against arithmetic in fractions and one value at a time."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vllm_fp8ext.kernels.attention.kv_cache import (
    MARGIN,
    amax_by_head,
    dequantize,
    fit,
    next_scales,
    quantize,
)
from vllm_fp8ext.kernels.numerics.reference import AMAX_FLOOR, FP8_MAX, ScaleFormat

LARGEST = torch.finfo(torch.float32).max
SUBNORMAL = 2.0**-140

AMAX = st.floats(2.0**-33, 2.0**100, width=32)


def one(
    amax: float, served: float = 0.125, *, margin: float = MARGIN, scale_format: ScaleFormat = "pow2"
) -> float:
    now = torch.tensor([served])
    [result] = next_scales(torch.tensor([amax]), now, margin=margin, scale_format=scale_format).tolist()
    return float(result)


@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
@pytest.mark.parametrize("amax", [0.0, math.inf, math.nan, LARGEST])
def test_where_nothing_is_known_the_served_scale_stays(amax: float, scale_format: ScaleFormat) -> None:
    """The largest number is known, but with a margin of one power of two it is none."""
    served = 0.1
    assert one(amax, served, scale_format=scale_format) == torch.tensor(served).item()


def test_each_scale_stays_or_changes_alone() -> None:
    served = torch.tensor([3.0, 5.0, 7.0, 9.0])
    scales = next_scales(torch.tensor([math.nan, 448.0, 0.0, 224.0]), served, margin=0.0)
    assert scales.tolist() == [3.0, 1.0, 7.0, 0.5]
    assert served.tolist() == [3.0, 5.0, 7.0, 9.0]


@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
def test_the_smallest_scale_is_a_normal_number(scale_format: ScaleFormat) -> None:
    """Kernels multiply by one over a scale, and flush subnormal numbers."""
    result = one(SUBNORMAL, scale_format=scale_format, margin=0.0)
    assert torch.finfo(torch.float32).tiny < result <= 2 * AMAX_FLOOR / FP8_MAX


@given(AMAX, st.integers(0, 8))
def test_a_power_of_two_is_the_smallest_that_holds_amax_and_margin(amax: float, margin: int) -> None:
    scale = Fraction(one(amax, margin=float(margin)))
    mantissa, _ = math.frexp(float(scale))
    assert mantissa == 0.5
    wanted = Fraction(amax) * 2**margin
    assert scale * 448 >= wanted > scale * 448 / 2


@given(AMAX, st.integers(0, 8))
def test_the_other_format_is_the_quotient(amax: float, margin: int) -> None:
    exact = Fraction(amax) * 2**margin / 448
    scale = Fraction(one(amax, margin=float(margin), scale_format="fp32"))
    assert abs(scale - exact) <= exact * Fraction(1, 2**24)


def test_by_default_values_may_double() -> None:
    assert MARGIN == 1.0
    assert one(448.0) == 2.0


@given(st.lists(AMAX, min_size=1, max_size=8))
def test_a_step_between_powers_of_two_keeps_what_codes_mean(values: list[float]) -> None:
    """As long as no code leaves the range of normal numbers."""
    codes = torch.tensor([[[1.0, -448.0, 0.25, 208.0]]]).expand(1, len(values), 4).to(torch.float8_e4m3fn)
    before = next_scales(torch.tensor(values), torch.ones(len(values)))
    again = quantize(dequantize(codes, before), before * 2)
    assert torch.equal(dequantize(again, before * 2), dequantize(codes, before))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bits_are_the_same_for_an_amax_that_travelled(dtype: torch.dtype) -> None:
    """The server sends amax as numbers between its ranks, a trainer keeps the tensor."""
    values = (torch.randn(50, 4, 16, generator=torch.Generator().manual_seed(3)) * 3).to(dtype)
    amax = amax_by_head(values, 4)
    assert amax.dtype == torch.float32
    for scale_format in ("pow2", "fp32"):
        here = next_scales(amax, torch.ones(4), scale_format=scale_format)
        there = next_scales(
            torch.tensor(amax.tolist()),
            torch.tensor(torch.ones(4).tolist()),
            scale_format=scale_format,
        )
        assert torch.equal(here.view(torch.int32), there.view(torch.int32))
        assert torch.equal(here, next_scales(amax, torch.ones(4), margin=1.0, scale_format=scale_format))


def test_neighbouring_heads_make_a_group() -> None:
    values = torch.zeros(3, 6, 2, dtype=torch.bfloat16)
    values[1, 1, 0], values[2, 2, 1], values[0, 5, 0] = -7.0, 3.0, 5.0
    assert amax_by_head(values, 6).tolist() == [0, 7, 3, 0, 0, 5]
    assert amax_by_head(values, 3).tolist() == [7, 3, 5]
    assert amax_by_head(values, 2).tolist() == [7, 5]
    assert amax_by_head(values, 1).tolist() == [7]


def test_no_tokens_have_no_amax() -> None:
    assert amax_by_head(torch.zeros(0, 4, 8), 2).tolist() == [0, 0]


def test_nan_is_told_by_its_head() -> None:
    values = torch.ones(2, 2, 2)
    values[1, 0, 1] = math.nan
    first, second = amax_by_head(values, 2).tolist()
    assert math.isnan(first)
    assert second == 1.0


def values_and_scales(per_head: bool) -> tuple[Tensor, Tensor]:
    values = torch.randn(20, 3, 8, generator=torch.Generator().manual_seed(1)) * torch.tensor(
        [1.0, 10.0, 100.0]
    ).view(3, 1)
    amax = amax_by_head(values, 3 if per_head else 1)
    return values.bfloat16(), next_scales(amax, torch.ones_like(amax), margin=0.0)


@pytest.mark.parametrize("per_head", [False, True])
def test_a_code_is_the_nearest(per_head: bool) -> None:
    values, scales = values_and_scales(per_head)
    bits = torch.arange(256, dtype=torch.uint8)
    codes = bits.view(torch.float8_e4m3fn).double()
    codes = codes[codes.isfinite()]
    result = quantize(values, scales).double()
    for head in range(3):
        scale = scales[head if per_head else 0].double()
        exact = values[:, head].double() / scale
        nearest = (exact[..., None] - codes).abs().amin(-1)
        assert torch.equal((exact - result[:, head]).abs(), nearest)
    assert torch.equal(
        dequantize(quantize(values, scales), scales), (result * scales.double().view(-1, 1)).float()
    )


def test_values_beyond_the_largest_code_become_it() -> None:
    values = torch.tensor([500.0, -1e30, math.inf, -448.0, 448.0]).view(1, 1, -1)
    assert quantize(values, torch.ones(1)).flatten().tolist() == [448, -448, 448, -448, 448]


@pytest.mark.parametrize("per_head", [False, True])
def test_a_fit_is_summed_over_all_elements(per_head: bool) -> None:
    values, scales = values_and_scales(per_head)
    scales = scales / 4
    fitted = fit(values, scales)
    wide = scales.double().view(-1, 1)
    exact = values.double()
    error = quantize(values, scales).double() * wide - exact
    assert fitted.elements == values.numel()
    assert fitted.saturated == int((exact.abs() > 448 * wide).sum()) > 0
    assert fitted.squared_error == pytest.approx(float(error.square().sum()), rel=1e-6)
    assert fitted.squared_norm == pytest.approx(float(exact.square().sum()), rel=1e-6)


def test_scales_that_fit_lose_the_format_alone() -> None:
    values, scales = values_and_scales(per_head=True)
    fitted = fit(values, scales)
    assert fitted.saturated == 0
    assert 0.01 < math.sqrt(fitted.squared_error / fitted.squared_norm) < 2.0**-4


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_beyond_and_in_no_sum(value: float) -> None:
    """Sums that are no numbers can't be sent as JSON."""
    values = torch.tensor([[[1.0, 2.0, value]]])
    fitted = fit(values, torch.ones(1))
    assert (fitted.elements, fitted.saturated) == (3, 1)
    assert (fitted.squared_error, fitted.squared_norm) == (0.0, 5.0)
