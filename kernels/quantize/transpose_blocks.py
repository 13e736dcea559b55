# SPDX-License-Identifier: Apache-2.0
"""Transposes FP8 operands on a GPU, one launch each: FP8 tensor cores read both operands along what is summed up.

A weight's blocks keep codes and scales. Activations have a scale for each token, which no transpose has: their values are
quantized again, in blocks of 128×128, as `reference.quantize_weight` does.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_fp8ext.kernels.numerics.quantized import Quantized
from vllm_fp8ext.kernels.numerics.reference import BLOCK, FP8_DTYPE, ScaleFormat, blocks
from vllm_fp8ext.kernels.numerics.triton_numerics import amax_bits, codes_of, scale_of


@triton.jit
def _transpose_blocks(
    codes_MK,
    scales,
    out_KM,
    out_scales,
    M,
    K,
    out_row,
    scales_row,
    scales_column,
    out_blocks,
    AGAIN: tl.constexpr,
    POW2: tl.constexpr,
    HARDWARE: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One program: one block. `AGAIN`: scales are by row, and the block is quantized again."""
    row_block, column_block = tl.program_id(0), tl.program_id(1)
    rows = (row_block * SIZE + tl.arange(0, SIZE)).to(tl.int64)
    columns = (column_block * SIZE + tl.arange(0, SIZE)).to(tl.int64)
    inside = (rows < M)[:, None] & (columns < K)[None, :]
    codes = tl.load(codes_MK + (rows * K)[:, None] + columns[None, :], mask=inside, other=0)
    if AGAIN:
        each = tl.load(scales + rows * scales_row + column_block * scales_column, mask=rows < M, other=0.0)
        x = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32) * each[:, None]
        scale = scale_of(amax_bits(x), POW2, HARDWARE)
        codes = codes_of(x, scale, False, HARDWARE)
    else:
        scale = tl.load(scales + row_block * scales_row + column_block * scales_column)
    at = out_KM + (columns * out_row)[:, None] + rows[None, :]
    tl.store(at, tl.trans(codes), mask=(columns < K)[:, None] & (rows < out_row)[None, :])
    tl.store(out_scales + column_block * out_blocks + row_block, scale)


def transpose_weight(codes_NK: Tensor, scales_NbKb: Tensor) -> tuple[Tensor, Tensor]:
    """Transpose a weight in blocks: codes `[K, N]`, scales `[ceil(K/128), ceil(N/128)]`."""
    return _transposed(codes_NK, scales_NbKb, codes_NK.shape[0], again=False, pow2=False)


def transpose_codes(codes_MK: Tensor) -> Tensor:
    """Transpose codes of either FP8 format, without scales: `[K, M]`."""
    m, k = codes_MK.shape
    one = torch.ones((), dtype=torch.float32, device=codes_MK.device).expand(blocks(m), blocks(k))
    return _transposed(codes_MK, one, m, again=False, pow2=False)[0].view(codes_MK.dtype)


def requantize_transposed(x: Quantized, scale_format: ScaleFormat) -> tuple[Tensor, Tensor]:
    """Transpose activations, and quantize their values in blocks.

    Returns E4M3 codes `[K, ceil(M/128) * 128]`, zero behind the last token, and fp32 scales `[ceil(K/128), ceil(M/128)]`. NaN
    and infinity make a block's scale so, and raise nothing.
    """
    room = blocks(x.codes.shape[0]) * BLOCK
    return _transposed(*x, room, again=True, pow2=scale_format == "pow2")


def _transposed(
    codes_MK: Tensor, scales: Tensor, room: int, *, again: bool, pow2: bool
) -> tuple[Tensor, Tensor]:
    m, k = codes_MK.shape
    out = torch.empty(k, room, dtype=FP8_DTYPE, device=codes_MK.device)
    out_scales = torch.empty(blocks(k), blocks(m), dtype=torch.float32, device=codes_MK.device)
    if m:
        _transpose_blocks[blocks(m), blocks(k)](
            codes_MK.view(torch.uint8),
            scales,
            out.view(torch.uint8),
            out_scales,
            *(m, k, room, *scales.stride(), blocks(m)),
            AGAIN=again,
            POW2=pow2,
            HARDWARE=codes_MK.is_cuda,
            SIZE=BLOCK,
            num_warps=8,
        )
    return out, out_scales
