# SPDX-License-Identifier: Apache-2.0
"""Product of FP8 blocks in Triton, for what DeepGEMM does not take.

Like DeepGEMM it adds up 128 columns on tensor cores, scales that sum, and adds it in fp32 to those before (DeepSeek-V3,
arXiv 2412.19437, section 3.3.2).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_fp8ext.kernels.numerics.quantized import Quantized
from vllm_fp8ext.kernels.numerics.reference import BLOCK
from vllm_fp8ext.kernels.numerics.triton_numerics import rounded

_TOGETHER = 8
"""Tiles of tokens that read the same weights in turn, from the L2 cache."""


@triton.jit
def _block_gemm(
    x_MK,
    x_scales,
    weight_NK,
    weight_scales,
    out_MN,
    M,
    N,
    K,
    offset,
    x_scales_token,
    x_scales_block,
    weight_scales_row,
    weight_scales_column,
    E5M2: tl.constexpr,
    EVEN: tl.constexpr,
    HARDWARE: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    TOGETHER: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One program: a tile of `TOKENS` tokens and `ROWS` rows of the weight."""
    token_tiles, row_tiles = tl.cdiv(M, TOKENS), tl.cdiv(N, ROWS)
    group = tl.program_id(0) // (TOGETHER * row_tiles)
    size = min(token_tiles - group * TOGETHER, TOGETHER)
    place = tl.program_id(0) % (TOGETHER * row_tiles)
    tokens = ((group * TOGETHER + place % size) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    rows = ((place // size) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.arange(0, SIZE)
    # what lies behind the edge is multiplied like the last row and never stored
    token, row = tl.minimum(tokens, M - 1), tl.minimum(rows, N - 1)
    x_at = x_MK + (token * K)[:, None] + columns[None, :]
    weight_at = weight_NK + (row * K)[None, :] + columns[:, None]
    x_scale_at = x_scales + token * x_scales_token
    scale_at = weight_scales + (row + offset) // SIZE * weight_scales_row
    total = tl.zeros((TOKENS, ROWS), tl.float32)
    for block in range(tl.cdiv(K, SIZE)):
        if EVEN:
            x = tl.load(x_at)
            weight = tl.load(weight_at)
        else:
            left = columns < K - block * SIZE
            x = tl.load(x_at, mask=left[None, :], other=0)
            weight = tl.load(weight_at, mask=left[:, None], other=0)
        x = x.to(tl.float8e5, bitcast=True) if E5M2 else x.to(tl.float8e4nv, bitcast=True)
        part = tl.dot(x, weight.to(tl.float8e4nv, bitcast=True))
        x_scale = tl.load(x_scale_at + block * x_scales_block)
        scale = tl.load(scale_at + block * weight_scales_column)
        total += part * x_scale[:, None] * scale[None, :]
        x_at += SIZE
        weight_at += SIZE
    total = rounded(total, out_MN.dtype.element_ty, HARDWARE).to(out_MN.dtype.element_ty)
    inside = (tokens < M)[:, None] & (rows < N)[None, :]
    tl.store(out_MN + (tokens * N)[:, None] + rows[None, :], total, mask=inside)


def block_gemm(
    x: Quantized, codes_NK: Tensor, scales_NbKb: Tensor, dtype: torch.dtype, *, offset: int = 0
) -> Tensor:
    """Multiply `x @ weight.T`: `[M, N]` of `dtype`, accumulated in fp32.

    `x`: codes in E4M3 or E5M2, contiguous, K any number. `codes_NK`: E4M3, contiguous, whose first block of 128 rows begins
    `offset` rows above it. Scales are fp32 in any layout.
    """
    (m, k), n = x.codes.shape, codes_NK.shape[0]
    out = torch.empty(m, n, dtype=dtype, device=codes_NK.device)
    if not out.numel():
        return out
    tokens, rows = (128, 128) if m > 64 else (64, 128)
    _block_gemm[(triton.cdiv(m, tokens) * triton.cdiv(n, rows),)](
        x.codes.view(torch.uint8),
        x.scales,
        codes_NK.view(torch.uint8),
        scales_NbKb,
        out,
        *(m, n, k, offset, *x.scales.stride(), *scales_NbKb.stride()),
        E5M2=x.codes.dtype == torch.float8_e5m2,
        EVEN=k % BLOCK == 0,
        HARDWARE=x.codes.is_cuda,
        TOKENS=tokens,
        ROWS=rows,
        TOGETHER=_TOGETHER,
        SIZE=BLOCK,
        num_warps=8,
        num_stages=4,
    )
    return out
