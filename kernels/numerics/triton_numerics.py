# SPDX-License-Identifier: Apache-2.0
"""`reference.py` for Triton kernels: scales and codes, bit for bit."""

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

from vllm_fp8ext.kernels.runtime import compile_counts

AMAX_FLOOR_BITS = tl.constexpr(0x2EDBE6FF)
"""1e-10 as fp32. Magnitudes compare like their bits, and NaN is larger than all of them."""
INFINITY_BITS = tl.constexpr(0x7F800000)
MANTISSA_BITS = tl.constexpr(0x7FFFFF)
MANTISSA_448 = tl.constexpr(0x600000)
"""448 is 1.75 * 2^8: the bits after the point."""


def _division(before: str, values: Sequence[str], first: int) -> str:
    """Codes, in $0, of four values; from $`first` on come the reciprocals of their scales, then the scales."""
    lines = ["{ .reg .f32 x<4>, g<4>, r, m; .reg .b16 low, high;", before]
    for i, x in enumerate(values):
        # g = x * y; r = g * scale - x; g -= r * y: the signs are such that -0 stays -0
        y, scale = f"${first + i}", f"${first + 4 + i}"
        lines += [f"mul.rn.f32 g{i}, {x}, {y}; neg.f32 m, {x}; fma.rn.f32 r, g{i}, {scale}, m;"]
        lines += [f"neg.f32 m, {y}; fma.rn.f32 g{i}, r, m, g{i};"]
    lines += ["cvt.rn.satfinite.e4m3x2.f32 low, g1, g0; cvt.rn.satfinite.e4m3x2.f32 high, g3, g2;"]
    return "".join([*lines, "mov.b32 $0, {low, high}; }"])


_SHORT_DIVISION = tl.constexpr(_division("", ("$1", "$2", "$3", "$4"), 5))
"""PTX for codes of values in $1 to $4."""
_BFLOAT16_DIVISION = tl.constexpr(
    _division(
        "shl.b32 $0, $1, 16; mov.b32 x0, $0; and.b32 $0, $1, 0xffff0000; mov.b32 x1, $0;"
        "shl.b32 $0, $2, 16; mov.b32 x2, $0; and.b32 $0, $2, 0xffff0000; mov.b32 x3, $0;",
        ("x0", "x1", "x2", "x3"),
        3,
    )
)
"""PTX for codes of BF16 values, two in $1 and two in $2. $0 is written early."""
_SCALE = tl.constexpr(
    "{ .reg .f32 q, r; .reg .pred number; mul.rn.f32 q, $1, 0f3B124925; fma.rn.f32 r, q, 0fC3E00000, $1;"
    "fma.rn.f32 r, r, 0f3B124925, q; setp.num.f32 number, r, r; selp.f32 $0, r, q, number; }"
)
"""PTX for $1 / 448, by a reciprocal (0f3B124925) and a correction.

That is exact (tried for every mantissa, see the test); infinite where $1 is. Without the branches that a division has for
what no scale is: subnormal."""
_RECIPROCAL = tl.constexpr(
    "{ .reg .f32 e, m; neg.f32 m, $1; rcp.approx.ftz.f32 $0, $1;"
    + 2 * "fma.rn.f32 e, m, $0, 0f3F800000; fma.rn.f32 $0, $0, e, $0;"
    + "}"
)
"""1 / $1 by the steps of a division, likewise without its branches. $0 is written early."""

_TO_E5M2 = tl.constexpr(
    "{ .reg .b16 low, high; cvt.rn.satfinite.e5m2x2.f32 low, $2, $1; cvt.rn.satfinite.e5m2x2.f32 high, $4, $3;"
    "mov.b32 $0, {low, high}; }"
)
"""PTX for E5M2 codes, in $0, of four fp32 values."""


@triton.jit
def magnitude_bits(x):
    """Bits of |x| for fp32 `x`. Their maximum is that of the magnitudes, except that it keeps NaN."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def amax_bits(x, axis: tl.constexpr = None):
    """Return the bits of the largest magnitude of a tile, or along an axis.

    They are those of an fp32 value; NaN where there is one.
    """
    if x.dtype == tl.bfloat16:
        return tl.max(x.to(tl.int16, bitcast=True) & 0x7FFF, axis=axis).to(tl.int32) << 16
    return tl.max(magnitude_bits(x.to(tl.float32)), axis=axis)


@triton.jit
def scale_of(amax_bits, POW2: tl.constexpr, HARDWARE: tl.constexpr):
    """`reference.scale_of` of magnitudes given by their bits. `HARDWARE`: as for `codes_of`."""
    bits = tl.maximum(amax_bits, AMAX_FLOOR_BITS)
    if POW2:
        # smallest 2^k with 448 * 2^k >= 1.f * 2^e
        power = ((bits >> 23) - 8 + ((bits & MANTISSA_BITS) > MANTISSA_448).to(tl.int32)) << 23
        return tl.where(bits >= INFINITY_BITS, bits, power).to(tl.float32, bitcast=True)
    amax = bits.to(tl.float32, bitcast=True)
    if HARDWARE:
        return tl.inline_asm_elementwise(_SCALE, "=r,r", [amax], tl.float32, is_pure=True, pack=1)
    return tl.div_rn(amax, 448.0)


@triton.jit
def _reciprocal(scale):
    """Correctly rounded, of a scale of BF16 or FP16 values that is finite."""
    return tl.inline_asm_elementwise(_RECIPROCAL, "=&r,r", [scale], tl.float32, is_pure=True, pack=1)


@triton.jit
def codes_of(x, scale, SHORT: tl.constexpr, HARDWARE: tl.constexpr):
    """E4M3 codes of `x / scale`, as bytes; `x` is fp32 or BF16. `scale` has the shape of `x`, or one that broadcasts to it.

    `SHORT`: `x` holds BF16 or FP16 values. One reciprocal and one correction then give the correctly rounded quotient
    (tried for every pair of mantissas, see the test), for a third of a division's instructions. Quotients can exceed 448
    by a rounding, which the conversion takes back: no clamp is needed.

    `HARDWARE`: false in Triton's interpreter, which neither fuses multiply-adds nor rounds conversions right.
    """
    if HARDWARE and x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _BFLOAT16_DIVISION,
            "=&r" + ",r" * 10,
            [x, _reciprocal(scale), scale],
            tl.uint8,
            is_pure=True,
            pack=4,
        )
    x = x.to(tl.float32)
    if HARDWARE and SHORT:
        return tl.inline_asm_elementwise(
            _SHORT_DIVISION,
            "=r" + ",r" * 12,
            [x, _reciprocal(scale), scale],
            tl.uint8,
            is_pure=True,
            pack=4,
        )
    return encoded(tl.div_rn(x, scale), HARDWARE)


@triton.jit
def quantized(x, POW2: tl.constexpr, SHORT: tl.constexpr, HARDWARE: tl.constexpr):
    """Quantize groups of values, each a row of `x`, as `codes_of` takes it."""
    scale = scale_of(amax_bits(x, 1), POW2, HARDWARE)
    return codes_of(x, scale[:, None], SHORT, HARDWARE), scale


@triton.jit
def encoded(x, HARDWARE: tl.constexpr):
    """E4M3 codes of fp32 `x`, as bytes: to nearest, of two equally near codes the even one, at most 448.

    `HARDWARE`: as for `codes_of`; NaN keeps its sign only without.
    """
    if HARDWARE:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return _encode(x)


@triton.jit
def _encode(quotient):
    """The same in integers."""
    bits = magnitude_bits(quotient)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # below 2^-6 codes are multiples of 2^-9, the distance of fp32 numbers from 2^14 on
    subnormal = (tl.abs(quotient) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.minimum(tl.where(bits < 0x3C800000, subnormal, normal), 0x7E)
    code = tl.where(bits > INFINITY_BITS, 0x7F, code)
    negative = quotient.to(tl.int32, bitcast=True) < 0
    return (code | tl.where(negative, 0x80, 0)).to(tl.uint8)


@triton.jit
def e5m2_of(x, scale, HARDWARE: tl.constexpr):
    """E5M2 codes of fp32 `x / scale`, as bytes: to nearest, of two equally near codes the even one, at most 57344."""
    quotient = tl.div_rn(x, scale)
    if HARDWARE:
        return tl.inline_asm_elementwise(_TO_E5M2, "=r,r,r,r,r", [quotient], tl.uint8, is_pure=True, pack=4)
    bits = magnitude_bits(quotient)
    normal = ((bits + 0xFFFFF + ((bits >> 21) & 1)) >> 21) - (112 << 2)
    # below 2^-14 codes are multiples of 2^-16, the distance of fp32 numbers from 2^7 on
    subnormal = (tl.abs(quotient) + 128.0).to(tl.int32, bitcast=True) - 0x43000000
    code = tl.minimum(tl.where(bits < 0x38800000, subnormal, normal), 0x7B)
    code = tl.where(bits > INFINITY_BITS, 0x7F, code)
    negative = quotient.to(tl.int32, bitcast=True) < 0
    return (code | tl.where(negative, 0x80, 0)).to(tl.uint8)


@triton.jit
def rounded(x, dtype: tl.constexpr, HARDWARE: tl.constexpr):
    """fp32 `x` rounded to BF16 or FP16, as fp32."""
    if HARDWARE or dtype != tl.bfloat16:
        return x.to(dtype).to(tl.float32)
    bits = x.to(tl.uint32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)


_before = triton.knobs.runtime.jit_post_compile_hook


def _note(*args: Any, **named: Any) -> Any:
    compile_counts.note("triton")
    return _before(*args, **named) if _before else None


triton.knobs.runtime.jit_post_compile_hook = _note
