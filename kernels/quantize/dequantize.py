# SPDX-License-Identifier: Apache-2.0
"""Values of FP8 codes on a GPU, in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_fp8ext.kernels.numerics.reference import BLOCK, blocks
from vllm_fp8ext.kernels.numerics.triton_numerics import rounded

_ROWS = 32
"""Rows that a program takes."""


@triton.jit
def _dequantize(
    codes_MK,
    scales,
    out_MK,
    M,
    K,
    offset,
    scales_row,
    scales_column,
    E5M2: tl.constexpr,
    SCALED: tl.constexpr,
    HARDWARE: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One program: 128 columns of `ROWS` rows, of which `SCALED` have one scale."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = (rows < M)[:, None] & (columns < K)[None, :]
    at = (rows * K)[:, None] + columns[None, :]
    scale_at = scales + (rows + offset) // SCALED * scales_row + tl.program_id(1) * scales_column
    scale = tl.load(scale_at, mask=rows < M, other=0.0)
    codes = tl.load(codes_MK + at, mask=inside, other=0)
    if E5M2:
        values = codes.to(tl.float8e5, bitcast=True).to(tl.float32)
    else:
        values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    values = rounded(values * scale[:, None], out_MK.dtype.element_ty, HARDWARE)
    tl.store(out_MK + at, values.to(out_MK.dtype.element_ty), mask=inside)


def dequantize(
    codes_MK: Tensor, scales: Tensor, dtype: torch.dtype, *, rows: int = 1, offset: int = 0
) -> Tensor:
    """Return `[M, K]` of `dtype`: the fp32 product of code and scale, rounded once.

    `codes_MK`: E4M3 or E5M2, contiguous. `scales`: fp32, one for 128 columns of `rows` rows, in any layout. The first block
    of rows begins `offset` rows above the first row.
    """
    m, k = codes_MK.shape
    out = torch.empty(m, k, dtype=dtype, device=codes_MK.device)
    if m:
        _dequantize[triton.cdiv(m, _ROWS), blocks(k)](
            codes_MK.view(torch.uint8),
            scales,
            out,
            *(m, k, offset, *scales.stride()),
            E5M2=codes_MK.dtype == torch.float8_e5m2,
            SCALED=rows,
            HARDWARE=codes_MK.is_cuda,
            ROWS=_ROWS,
            SIZE=BLOCK,
        )
    return out
