# SPDX-License-Identifier: Apache-2.0
"""The fused norm against its reference, bit for bit.

Sums of squares depend on their order, so inputs are small integers times a power of two: their squares add up exactly, in
any order. The weights of the norm are of every kind, and so are then the values that are quantized.
"""

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.numerics.reference import ScaleFormat
from vllm_fp8ext.kernels.testing import hard_cases, kernel_cases

pytest.importorskip("triton", reason="needs Triton, which the CPU build does not bring")
from vllm_fp8ext.kernels.quantize import rmsnorm_quantize as kernel
from vllm_fp8ext.kernels.quantize.rmsnorm_quantize import rmsnorm_quantize_reference

SIZES = st.one_of(st.integers(1, 5), st.sampled_from((127, 128, 129, 1024)), st.integers(1, 2500))


def rmsnorm_quantize(
    *arguments: Any, small_m: bool = False, adds_one: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and the new residual, as the reference returns them."""
    (codes, scales), added = kernel.rmsnorm_quantize(*arguments, small_m=small_m, adds_one=adds_one)
    return codes, scales, added


@given(
    st.integers(1, 4),
    SIZES,
    st.integers(-8, 8),
    st.sampled_from(("normal", "heavy", "zeros", "floor")),
    st.booleans(),
    st.booleans(),
    st.sampled_from((torch.bfloat16, torch.float16)),
    st.sampled_from(("fp32", "pow2")),
    st.integers(0, 2**32 - 2),
)
@example(1, 1, 0, "normal", False, False, torch.bfloat16, "fp32", 0)
@example(1, 300, 0, "heavy", True, True, torch.bfloat16, "pow2", 0)
@settings(max_examples=40)
def test_everything_is_the_references(
    device: str,
    m: int,
    k: int,
    exponent: int,
    kind: str,
    add: bool,
    small_m: bool,
    dtype: torch.dtype,
    scale_format: ScaleFormat,
    seed: int,
) -> None:
    x = hard_cases.integers(m, k, exponent=exponent, dtype=dtype, seed=seed)
    residual = hard_cases.integers(m, k, exponent=exponent, dtype=dtype, seed=seed + 1) if add else None
    # products with up to sqrt(k) stay finite
    weight = hard_cases.awkward(1, k, kind, dtype, seed)[0].clamp(-500, 500)
    here = x.to(device), None if residual is None else residual.to(device), weight.to(device)
    quantized = rmsnorm_quantize(*here, 1e-6, scale_format, small_m=small_m)
    expected = rmsnorm_quantize_reference(x, residual, weight, 1e-6, scale_format)
    assert [kernel_cases.same(a, b) for a, b in zip(quantized, expected, strict=True)] == [True] * 3


def test_a_token_of_zeros_stays_zero(device: str) -> None:
    x = torch.zeros(1, 200, dtype=torch.bfloat16)
    weight = torch.ones(200, dtype=torch.bfloat16)
    quantized = rmsnorm_quantize(x.to(device), None, weight.to(device), 1e-6, "fp32")
    expected = rmsnorm_quantize_reference(x, None, weight, 1e-6, "fp32")
    assert [kernel_cases.same(a, b) for a, b in zip(quantized, expected, strict=True)] == [True] * 3
    assert not quantized[0].view(torch.uint8).any()


def test_rows_may_lie_apart(device: str) -> None:
    wide = hard_cases.integers(3, 700, exponent=0, dtype=torch.bfloat16, seed=1)
    x, residual = wide[:, :300], wide[:, 400:]
    weight = hard_cases.awkward(1, 300, "normal", torch.bfloat16)[0]
    there = wide.to(device)
    quantized = rmsnorm_quantize(there[:, :300], there[:, 400:], weight.to(device), 1e-6, "pow2")
    expected = rmsnorm_quantize_reference(x, residual, weight, 1e-6, "pow2")
    assert [kernel_cases.same(a, b) for a, b in zip(quantized, expected, strict=True)] == [True] * 3


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_only_the_token_with_what_is_not_finite_is_lost(device: str, value: float) -> None:
    """NaN and infinity reach the mean, hence the whole token."""
    x = hard_cases.integers(3, 300, exponent=0, dtype=torch.bfloat16, seed=2)
    weight = torch.ones(300, dtype=torch.bfloat16)
    expected = rmsnorm_quantize_reference(x, None, weight, 1e-6, "fp32")
    x[1, 200] = value
    quantized = rmsnorm_quantize(x.to(device), None, weight.to(device), 1e-6, "fp32")
    wanted = rmsnorm_quantize_reference(x, None, weight, 1e-6, "fp32")
    assert torch.isfinite(quantized[1]).tolist() == torch.isfinite(wanted[1]).tolist()
    assert not torch.isfinite(quantized[1][1]).all()
    for row in (0, 2):
        assert kernel_cases.same(quantized[0][row], expected[0][row])
        assert kernel_cases.same(quantized[1][row], expected[1][row])


@pytest.mark.parametrize("add", [False, True], ids=["alone", "with a residual"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_norms_of_gemma_multiply_by_one_more(device: str, dtype: torch.dtype, add: bool) -> None:
    """As vLLM computes them: by `1 + weight` in fp32, and rounded once."""
    x = hard_cases.integers(3, 300, exponent=0, dtype=dtype, seed=4)
    residual = hard_cases.integers(3, 300, exponent=0, dtype=dtype, seed=5) if add else None
    weight = hard_cases.awkward(1, 300, "normal", dtype)[0].clamp(-2, 2)
    here = x.to(device), None if residual is None else residual.to(device), weight.to(device)
    quantized = rmsnorm_quantize(*here, 1e-6, "fp32", adds_one=True)
    expected = rmsnorm_quantize_reference(x, residual, weight, 1e-6, "fp32", adds_one=True)
    assert [kernel_cases.same(a, b) for a, b in zip(quantized, expected, strict=True)] == [True] * 3
    whole = x.float() if residual is None else x.float() + residual.float()
    normed = whole * torch.rsqrt(whole.square().mean(-1, keepdim=True) + 1e-6)
    by_hand = reference.quantize_activation((normed * (weight.float() + 1)).to(dtype), "fp32")
    assert [kernel_cases.same(a, b) for a, b in zip(quantized, by_hand, strict=False)] == [True] * 2
