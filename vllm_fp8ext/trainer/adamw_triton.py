# SPDX-License-Identifier: Apache-2.0
"""`optimizer.reference_step` on a GPU in one launch.

Codes may differ from the reference's by a step where a power is near the middle between two: a GPU's `log2` and `exp2` err by
some units in the last place.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_fp8ext.kernels.numerics.triton_numerics import encoded, rounded
from vllm_fp8ext.trainer.group_moments import GROUP, LARGEST_EXPONENT, LOG2_RANGE, Moments
from vllm_fp8ext.trainer.optimizer import AdamWStep

GROUPS = 8
"""Groups that a program takes."""
_LARGEST_EXPONENT = tl.constexpr(LARGEST_EXPONENT)
_LOG2_E4M3 = tl.constexpr(LOG2_RANGE["e4m3"])
_LOG2_E5M2 = tl.constexpr(LOG2_RANGE["e5m2"])
_LOG2_448 = tl.constexpr(8.807354922057604)
_LOG2_57344 = tl.constexpr(15.807354922057604)


@triton.jit
def _encode_e5m2(x):
    """E5M2 codes of fp32 `x`, as bytes: to nearest even, at most 57344; NaN stays NaN."""
    raw = x.to(tl.int32, bitcast=True)
    bits = raw & 0x7FFFFFFF
    normal = ((bits + 0xFFFFF + ((bits >> 21) & 1)) >> 21) - (112 << 2)
    # below 2^-14 codes are multiples of 2^-16, the distance of fp32 numbers from 2^7 on
    subnormal = (tl.abs(x) + 128.0).to(tl.int32, bitcast=True) - 0x43000000
    code = tl.minimum(tl.where(bits < 0x38800000, subnormal, normal), 0x7B)
    code = tl.where(bits > 0x7F800000, 0x7F, code)
    return (code | tl.where(raw < 0, 0x80, 0)).to(tl.uint8)


@triton.jit
def _values(code, amax, exponent, E5M2: tl.constexpr):
    """Return values `[groups, 128]` of codes, given as bytes. Each row has a scale and an exponent."""
    wide = code.to(tl.int16)
    sign = (wide & 0x80) << 8
    if E5M2:
        half = ((wide & 0x7F) << 8).to(tl.float16, bitcast=True).to(tl.float32)
        share = tl.log2(tl.where(half == 0, 1.0, half)) - _LOG2_57344
    else:
        half = ((wide & 0x7F) << 7).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        share = tl.log2(tl.where(half == 0, 1.0, half)) - _LOG2_448
    magnitude = tl.where(half == 0, 0.0, amax[:, None] * tl.exp2(share / exponent[:, None]))
    return tl.where(sign != 0, -magnitude, magnitude)


@triton.jit
def _codes(x, E5M2: tl.constexpr, EXPAND: tl.constexpr, HARDWARE: tl.constexpr):
    """Codes, as bytes, scale and exponent of rows of fp32 values."""
    magnitude = tl.abs(x)
    # maxima of bits keep NaN
    amax = tl.max(magnitude.to(tl.int32, bitcast=True), 1).to(tl.float32, bitcast=True)
    exponent = tl.zeros_like(amax) + 1.0
    safe = tl.where(amax > 0, amax, 1.0)
    if EXPAND:
        smallest = tl.min(tl.where(magnitude > 0, magnitude, float("inf")), 1)
        log2_range = _LOG2_E5M2 if E5M2 else _LOG2_E4M3
        distance = tl.log2(safe) - tl.log2(tl.where(amax > 0, smallest, 1.0))
        distance = tl.where(distance > 0, distance, 1e-3)
        exponent = tl.where(amax > smallest, log2_range / distance, _LARGEST_EXPONENT)
        exponent = tl.where(amax > 0, tl.minimum(exponent, _LARGEST_EXPONENT), 1.0)
        bits = exponent.to(tl.int32, bitcast=True)
        short = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536  # to BF16, nearest even
        exponent = short.to(tl.float32, bitcast=True)
    share = tl.log2(tl.where(magnitude == 0, 1.0, tl.div_rn(magnitude, safe[:, None] + 0.0 * magnitude)))
    largest = 57344.0 if E5M2 else 448.0
    scaled = largest * tl.exp2(share * exponent[:, None])
    scaled = tl.where(amax[:, None] > 0, tl.where(magnitude == 0, 0.0, scaled), amax[:, None])
    scaled = tl.where(x.to(tl.int32, bitcast=True) < 0, -scaled, scaled)
    code = _encode_e5m2(scaled) if E5M2 else encoded(scaled, HARDWARE)
    return code, amax, exponent


@triton.jit(do_not_specialize=["count"])
def _adamw(
    parameter,
    gradient,
    m_codes,
    m_scales,
    m_exponents,
    v_codes,
    v_scales,
    v_exponents,
    count,
    rate,
    rest1,
    beta2,
    rest2,
    epsilon,
    kept,
    bias1,
    bias2,
    M_E5M2: tl.constexpr,
    V_E5M2: tl.constexpr,
    EXPAND: tl.constexpr,
    SHORT: tl.constexpr,
    HARDWARE: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One program, `GROUPS` groups: reads moments, steps, and writes parameter and moments."""
    rows = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    places = rows[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    inside, grouped = places < count, rows * SIZE < count
    g = tl.load(gradient + places, mask=inside, other=0.0).to(tl.float32)
    p = tl.load(parameter + places, mask=inside, other=0.0).to(tl.float32)
    m = _values(
        tl.load(m_codes + places, mask=inside, other=0),
        tl.load(m_scales + rows, mask=grouped, other=0.0),
        tl.load(m_exponents + rows, mask=grouped, other=1.0).to(tl.float32),
        M_E5M2,
    )
    v = _values(
        tl.load(v_codes + places, mask=inside, other=0),
        tl.load(v_scales + rows, mask=grouped, other=0.0),
        tl.load(v_exponents + rows, mask=grouped, other=1.0).to(tl.float32),
        V_E5M2,
    )
    m += rest1 * (g - m)
    v = beta2 * v + rest2 * g * g
    p = p * kept - rate / bias1 * m / (tl.sqrt(v / bias2) + epsilon)
    p = rounded(p, parameter.dtype.element_ty, HARDWARE) if SHORT else p
    tl.store(parameter + places, p.to(parameter.dtype.element_ty), mask=inside)
    code, scale, exponent = _codes(tl.where(inside, m, 0.0), M_E5M2, EXPAND, HARDWARE)
    tl.store(m_codes + places, code, mask=inside)
    tl.store(m_scales + rows, scale, mask=grouped)
    tl.store(m_exponents + rows, exponent.to(m_exponents.dtype.element_ty), mask=grouped)
    code, scale, exponent = _codes(tl.where(inside, v, 0.0), V_E5M2, EXPAND, HARDWARE)
    tl.store(v_codes + places, code, mask=inside)
    tl.store(v_scales + rows, scale, mask=grouped)
    tl.store(v_exponents + rows, exponent.to(v_exponents.dtype.element_ty), mask=grouped)


def adamw_step(
    parameter: Tensor, gradient: Tensor, first: Moments, second: Moments, numbers: AdamWStep
) -> None:
    """Take `reference_step` in one launch; all tensors are contiguous, on the current device."""
    count = parameter.numel()
    if not count:
        return
    _adamw[(-(-count // (GROUPS * GROUP)),)](
        parameter,
        gradient,
        first.codes.view(torch.uint8),
        first.scales,
        first.exponents,
        second.codes.view(torch.uint8),
        second.scales,
        second.exponents,
        count,
        numbers.rate,
        1 - numbers.beta1,
        numbers.beta2,
        1 - numbers.beta2,
        numbers.epsilon,
        1 - numbers.rate * numbers.decay,
        1 - numbers.beta1**numbers.step,
        1 - numbers.beta2**numbers.step,
        first.codes.dtype == torch.float8_e5m2,
        second.codes.dtype == torch.float8_e5m2,
        numbers.expand,
        parameter.dtype.itemsize == 2,
        parameter.is_cuda,
        GROUPS,
        GROUP,
        num_warps=4,
    )
