# SPDX-License-Identifier: Apache-2.0
"""Blockwise FP8 in plain torch: the one definition of rounding, epsilon, scale format and padding.

Weights carry one scale per 128x128 block, activations one per token and 128 columns (the recipe of DeepSeek-V3,
arXiv 2412.19437, section 3.3). Every kernel is tested against this file; a trainer may import it to compute the same
codes, scales and digests from its BF16 tensors, since it needs nothing but torch.

Shape suffixes: N output features, K input features, M tokens; `b` marks a count of blocks, so `scales_NbKb` has shape
`[ceil(N / 128), ceil(K / 128)]`. Edges that are not multiples of 128 make smaller blocks; nothing is padded.
"""

from typing import Literal

import torch
from torch import Tensor

from vllm_fp8ext.kernels.numerics.layout import BLOCK as BLOCK
from vllm_fp8ext.kernels.numerics.layout import blocks as blocks

ScaleFormat = Literal["fp32", "pow2"]

FP8_DTYPE = torch.float8_e4m3fn
FP8_MAX = 448.0
"""Largest finite E4M3 value."""
AMAX_FLOOR = 1e-10
"""An amax below this is treated as this: a block of zeros gets a finite scale, and codes that are zero."""
UNIT = 16
"""Kernels for many tensors at once: what addresses must be a multiple of, in bytes, and distances of rows, in elements."""
ROUND_OFF = 2.0**-24
"""Unit round-off of fp32."""


class NonFiniteError(ValueError):
    """A tensor that was to be quantized holds NaN or infinity."""


def scale_of(amax: Tensor, scale_format: ScaleFormat) -> Tensor:
    """Scale of each block from its largest magnitude.

    `amax` is fp32 of any shape, ≥ 0; NaN and infinity stay what they are. `fp32`: `amax / 448`, rounded once.
    `pow2`: the smallest power of two that is ≥ amax / 448, decided exactly (448 times a power of two is exact in
    fp32), not by rounding a rounded quotient.
    """
    amax = amax.clamp_min(AMAX_FLOOR)
    # a tensor divisor: true division everywhere, where a Python number may become a multiplication by its reciprocal
    quotient = amax / torch.full((), FP8_MAX, dtype=torch.float32, device=amax.device)
    if scale_format == "fp32":
        return quotient
    if scale_format != "pow2":
        raise ValueError(f"scale_format: expected 'fp32' or 'pow2', found {scale_format!r}")
    mantissa, exponent = torch.frexp(quotient)
    power = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).to(exponent.dtype))
    power = torch.where(power * FP8_MAX < amax, power * 2, power)
    power = torch.where(power * (FP8_MAX / 2) >= amax, power / 2, power)
    return torch.where(torch.isfinite(amax), power, amax)


def is_pow2(scales: Tensor) -> bool:
    """Tell whether every scale is a power of two."""
    mantissa, _ = torch.frexp(scales)
    return bool((mantissa == 0.5).all())


def quantize_weight(weight_NK: Tensor, scale_format: ScaleFormat = "fp32") -> tuple[Tensor, Tensor]:
    """Quantize a weight: E4M3 codes `[N, K]` and fp32 scales `[ceil(N/128), ceil(K/128)]`.

    Codes are `weight / scale`, rounded to nearest even and clamped to ±448.

    Raises:
        NonFiniteError: the weight holds NaN or infinity.
    """
    rows, columns = weight_NK.shape
    tiles = _tiles(weight_NK)
    amax = tiles.abs().amax(dim=(1, 3))
    _require_finite(amax, "weight")
    scales = scale_of(amax, scale_format)
    codes = _round(tiles / scales[:, None, :, None])
    return codes.reshape(tiles.shape[0] * BLOCK, -1)[:rows, :columns].contiguous(), scales


def dequantize_weight(codes_NK: Tensor, scales_NbKb: Tensor) -> Tensor:
    """fp32 values `[N, K]` that codes and scales stand for."""
    rows, columns = codes_NK.shape
    scales = scales_NbKb.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return expand(codes_NK) * scales


def quantize_activation(x_MK: Tensor, scale_format: ScaleFormat = "fp32") -> tuple[Tensor, Tensor]:
    """Quantize activations per token and 128 columns: E4M3 codes `[M, K]`, fp32 scales `[M, ceil(K/128)]`."""
    rows, columns = x_MK.shape
    groups = _pad(x_MK.float(), 1, blocks(columns) * BLOCK).view(rows, blocks(columns), BLOCK)
    scales = scale_of(groups.abs().amax(dim=2), scale_format)
    codes = _round(groups / scales[:, :, None])
    return codes.view(rows, blocks(columns) * BLOCK)[:, :columns].contiguous(), scales


def dequantize_activation(codes_MK: Tensor, scales_MKb: Tensor) -> Tensor:
    """fp32 values `[M, K]` that codes and scales stand for."""
    return expand(codes_MK) * scales_MKb.repeat_interleave(BLOCK, 1)[:, : codes_MK.shape[1]]


def gemm(x_codes_MK: Tensor, x_scales_MKb: Tensor, codes_NK: Tensor, scales_NbKb: Tensor) -> Tensor:
    """`x @ weight.T` of the dequantized operands, accumulated in fp32; fp32 `[M, N]`."""
    return torch.nn.functional.linear(
        dequantize_activation(x_codes_MK, x_scales_MKb), dequantize_weight(codes_NK, scales_NbKb)
    )


def gemm_error_bound(
    x_codes_MK: Tensor, x_scales_MKb: Tensor, codes_NK: Tensor, scales_NbKb: Tensor
) -> Tensor:
    """Bound the absolute error of an fp32 GEMM of these operands: float64 `[M, N]`.

    A dot product of length K in fp32, in any order, errs by at most `gamma_K * sum |x||w|` with
    `gamma_n = n u / (1 - n u)` (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 3.1). Scaling each
    operand adds one rounding each, and the scales' product or a split sum a few more: hence K + 4.
    """
    terms = x_codes_MK.shape[1] + 4
    gamma = terms * ROUND_OFF / (1 - terms * ROUND_OFF)
    magnitude_x = dequantize_activation(x_codes_MK, x_scales_MKb).double().abs()
    magnitude_w = dequantize_weight(codes_NK, scales_NbKb).double().abs()
    return gamma * (magnitude_x @ magnitude_w.T)


def expand(codes: Tensor) -> Tensor:
    """E4M3 codes as fp32, exactly.

    Moves sign, exponent and mantissa into an FP16 number and corrects the exponent bias by 2^8: several times faster than
    the conversion on CPUs. NaN codes are not: weights have none.
    """
    if codes.device.type != "cpu":
        return codes.float()
    bits = codes.view(torch.int8).to(torch.int16)
    half = ((bits << 7) & 0x3F80) | (bits & -0x8000)
    return half.view(torch.float16).float() * 256.0


def _round(values: Tensor) -> Tensor:
    return values.clamp(-FP8_MAX, FP8_MAX).to(FP8_DTYPE)


def _require_finite(amax: Tensor, what: str) -> None:
    if not bool(torch.isfinite(amax).all()):
        raise NonFiniteError(f"{what}: expected finite values, found NaN or infinity")


def _tiles(weight_NK: Tensor) -> Tensor:
    """fp32 view `[Nb, 128, Kb, 128]` of a weight, zero beyond its edges."""
    rows, columns = blocks(weight_NK.shape[0]), blocks(weight_NK.shape[1])
    padded = _pad(_pad(weight_NK.float(), 1, columns * BLOCK), 0, rows * BLOCK)
    return padded.view(rows, BLOCK, columns, BLOCK)


def _pad(x: Tensor, dim: int, size: int) -> Tensor:
    missing = size - x.shape[dim]
    if missing == 0:
        return x.contiguous()
    return torch.nn.functional.pad(x, (0, missing) if dim == 1 else (0, 0, 0, missing))
