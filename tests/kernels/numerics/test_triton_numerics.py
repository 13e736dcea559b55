# SPDX-License-Identifier: Apache-2.0
"""The short division of the kernels, computed in float64, against a true division.

`tests/gpu/test_kernels.py` runs the instructions themselves.
"""

import pytest
import torch
from torch import Tensor

from vllm_fp8ext.kernels.numerics import reference

MANTISSA_BITS = {torch.bfloat16: 7, torch.float16: 10}


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """`a * b + c` of fp32 numbers, rounded once.

    Products are exact in float64. Where a sum is not, its last bit is set: a sticky bit, so that rounding it again, to fp32,
    never meets a false tie (Boldo and Melquiond, Emulation of FMA and correctly rounded sums, 2008).
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    part = total - product
    lost = (product - (total - part)) + (addend - part)
    bits = total.view(torch.int64)
    # towards the lost part first: the sum was rounded to nearest, and odd means cut, then marked
    away = (lost != 0) & ((lost < 0) == (total > 0))
    bits = bits - away.long()
    return torch.where(lost != 0, bits | 1, bits).view(torch.float64).float()


def short_division(x: Tensor, scale: Tensor) -> Tensor:
    """As `triton_numerics._SHORT_DIVISION` and `decode_gemm.cu` do it."""
    reciprocal = torch.ones_like(scale) / scale
    quotient = x * reciprocal
    return fma(fma(quotient, scale, -x), -reciprocal, quotient)


@pytest.mark.parametrize("dtype", list(MANTISSA_BITS))
def test_short_division_rounds_every_pair_of_mantissas_once(dtype: torch.dtype) -> None:
    """All values of one power of two, over the scales of all largest values of another and of the floor: other exponents
    only move the quotient's."""
    steps = 2 ** MANTISSA_BITS[dtype]
    mantissas = 1 + torch.arange(steps) / steps
    scales = reference.scale_of(torch.cat((mantissas, torch.zeros(1))), "fp32")[:, None]
    # near its scale, so that the floor's quotients are numbers too
    x = mantissas * torch.exp2(torch.frexp(scales).exponent.float())
    assert torch.equal(short_division(x, scales), x / scales)
    assert not torch.equal(x * (torch.ones_like(scales) / scales), x / scales), "a product would do"


def short_scale(amax: Tensor) -> Tensor:
    """As `triton_numerics._SCALE` does it."""
    reciprocal, largest = torch.tensor(1.0) / 448.0, torch.tensor(-448.0)
    quotient = amax * reciprocal
    result = fma(fma(quotient, largest, amax), reciprocal, quotient)
    return torch.where(result == result, result, quotient)


def test_scales_of_every_mantissa_are_rounded_once() -> None:
    mantissas = torch.arange(1 << 23, 1 << 24, dtype=torch.int32).float() / 2.0**23
    assert torch.equal(short_scale(mantissas), mantissas / 448.0)
    assert not torch.equal(mantissas * (torch.tensor(1.0) / 448.0), mantissas / 448.0), "a product would do"


@pytest.mark.parametrize("value", [1e-10, 3.4e38, float("inf")])
def test_scales_at_the_ends(value: float) -> None:
    amax = torch.tensor(value)
    assert torch.equal(short_scale(amax), amax / 448.0)


def test_the_scale_of_nan_is_nan() -> None:
    assert short_scale(torch.tensor(float("nan"))).isnan()


def test_short_division_keeps_the_sign_of_zero() -> None:
    zeros = torch.tensor([0.0, -0.0])
    assert torch.equal(torch.signbit(short_division(zeros, torch.full((2,), 3.7))), torch.signbit(zeros))
