# SPDX-License-Identifier: Apache-2.0
"""Gradients in groups of 128 on a GPU, one launch each: along columns in E5M2, and along tokens, transposed.

Codes and scales are those of `reference.quantize_activation`, bit for bit. In E5M2 a scale is `amax / 57344`, that of E4M3
divided by 128, and a code is `x / scale` to nearest, of two equally near ones the even one.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_fp8ext.kernels.numerics.quantized import Quantized, empty
from vllm_fp8ext.kernels.numerics.reference import BLOCK, ScaleFormat, blocks
from vllm_fp8ext.kernels.numerics.triton_numerics import amax_bits, codes_of, e5m2_of, scale_of

_TILE = 64
"""Groups that a program takes."""


@triton.jit
def _quantized(
    x, AXIS: tl.constexpr, POW2: tl.constexpr, E5M2: tl.constexpr, SHORT: tl.constexpr, HARDWARE: tl.constexpr
):
    """Codes of groups of values along an axis, and their scales."""
    scale = scale_of(amax_bits(x, AXIS), POW2, HARDWARE)
    if E5M2:
        scale = scale * 0.0078125
        return e5m2_of(x.to(tl.float32), tl.expand_dims(scale, AXIS), HARDWARE), scale
    return codes_of(x, tl.expand_dims(scale, AXIS), SHORT, HARDWARE), scale


@triton.jit
def _quantize_rows(
    x_MK,
    codes_MK,
    scales_MKb,
    M,
    K,
    x_row,
    scales_block,
    POW2: tl.constexpr,
    E5M2: tl.constexpr,
    SHORT: tl.constexpr,
    HARDWARE: tl.constexpr,
    TILE: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One program: one group of each of `TILE` tokens."""
    tokens = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    columns = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = (tokens < M)[:, None] & (columns < K)[None, :]
    x = tl.load(x_MK + (tokens * x_row)[:, None] + columns[None, :], mask=inside, other=0.0)
    codes, scale = _quantized(x, 1, POW2, E5M2, SHORT, HARDWARE)
    tl.store(codes_MK + (tokens * K)[:, None] + columns[None, :], codes, mask=inside)
    tl.store(scales_MKb + tokens + tl.program_id(1) * scales_block, scale, mask=tokens < M)


@triton.jit
def _quantize_columns(
    x_MN,
    codes_NM,
    scales_NMb,
    M,
    N,
    x_row,
    codes_row,
    scales_block,
    POW2: tl.constexpr,
    E5M2: tl.constexpr,
    SHORT: tl.constexpr,
    HARDWARE: tl.constexpr,
    TILE: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One program: 128 tokens of `TILE` columns. Behind the last token codes are zero."""
    tokens = (tl.program_id(0) * SIZE + tl.arange(0, SIZE)).to(tl.int64)
    columns = (tl.program_id(1) * TILE + tl.arange(0, TILE)).to(tl.int64)
    inside = (tokens < M)[:, None] & (columns < N)[None, :]
    x = tl.load(x_MN + (tokens * x_row)[:, None] + columns[None, :], mask=inside, other=0.0)
    codes, scale = _quantized(x, 0, POW2, E5M2, SHORT, HARDWARE)
    at = codes_NM + (columns * codes_row)[:, None] + tokens[None, :]
    tl.store(at, tl.trans(codes), mask=(columns < N)[:, None])
    tl.store(scales_NMb + columns + tl.program_id(0) * scales_block, scale, mask=columns < N)


def quantize_rows(x_MK: Tensor, scale_format: ScaleFormat, dtype: torch.dtype) -> Quantized:
    """Quantize BF16, FP16 or fp32 rows in groups of 128 columns, in E4M3 or E5M2.

    Returns codes `[M, K]` of `dtype`, and fp32 scales `[M, ceil(K/128)]`, as `Quantized` lays them out.
    """
    x_MK = x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()
    m, k = x_MK.shape
    codes, scales = empty(m, k, x_MK.device)
    if m:
        _quantize_rows[triton.cdiv(m, _TILE), blocks(k)](
            x_MK,
            codes.view(torch.uint8),
            scales,
            *(m, k, x_MK.stride(0), scales.stride(1)),
            **_options(x_MK, scale_format, dtype),
        )
    return Quantized(codes.view(dtype), scales)


def quantize_columns(
    x_MN: Tensor, scale_format: ScaleFormat, dtype: torch.dtype = torch.float8_e4m3fn
) -> Quantized:
    """Quantize the transpose in groups of 128 tokens, in E4M3 or E5M2.

    Returns codes `[N, ceil(M/128) * 128]`, zero behind the last token, and fp32 scales `[N, ceil(M/128)]`.
    """
    x_MN = x_MN if x_MN.stride(1) == 1 else x_MN.contiguous()
    m, n = x_MN.shape
    codes, scales = empty(n, blocks(m) * BLOCK, x_MN.device)
    if m:
        _quantize_columns[blocks(m), triton.cdiv(n, _TILE)](
            x_MN,
            codes.view(torch.uint8),
            scales,
            *(m, n, x_MN.stride(0), codes.stride(0), scales.stride(1)),
            **_options(x_MN, scale_format, dtype),
        )
    return Quantized(codes.view(dtype), scales)


def _options(x: Tensor, scale_format: ScaleFormat, dtype: torch.dtype) -> dict[str, int | bool]:
    return {
        "POW2": scale_format == "pow2",
        "E5M2": dtype == torch.float8_e5m2,
        "SHORT": x.dtype.itemsize == 2,
        "HARDWARE": x.is_cuda,
        "TILE": _TILE,
        "SIZE": BLOCK,
        "num_warps": 8,
    }
