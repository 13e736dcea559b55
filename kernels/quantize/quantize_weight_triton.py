# SPDX-License-Identifier: Apache-2.0
"""`reference.quantize_weight` on a GPU: one launch, one read of the weight, codes and scales straight into place."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_fp8ext.kernels.numerics.reference import BLOCK, ScaleFormat, blocks
from vllm_fp8ext.kernels.numerics.triton_numerics import amax_bits, codes_of, scale_of

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of weights."""


def programs(dtype: torch.dtype, even: bool) -> dict[str, int]:
    """Return the warps of a program, and the most registers of a thread.

    Registers are limited for BF16 in whole blocks. With these four programs fit on an SM: 128 values in flight in each
    thread.
    """
    return {"num_warps": 4, "maxnreg": 128} if dtype == torch.bfloat16 and even else {"num_warps": 8}


@triton.jit
def _add_both(a, b, c, d):
    return a + c, b + d


@triton.jit
def write_block(x, codes_at, scale_at, sums_at, inside, POW2, SHORT, HARDWARE, SUMS):
    """Quantize a block `x` of any of `DTYPES` and store it; at `inside` where that is not None.

    BF16 stays two values to a register until its quotients are taken: so twice as many programs fit on an SM."""
    scale = scale_of(amax_bits(x), POW2, HARDWARE)
    codes = codes_of(x, scale, SHORT, HARDWARE)
    tl.store(codes_at, codes, mask=inside)
    tl.store(scale_at, scale)
    if SUMS:
        x = x.to(tl.float32)
        lost = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale - x
        if HARDWARE:
            squares = tl.ravel(lost * lost, can_reorder=True), tl.ravel(x * x, can_reorder=True)
            error, norm = tl.reduce(squares, 0, _add_both)
        else:  # the interpreter would call `_add_both` for each pair of values
            error, norm = tl.sum(lost * lost), tl.sum(x * x)
        tl.store(sums_at, error)
        tl.store(sums_at + 1, norm)
        tl.store(sums_at + 2, tl.where(scale - scale == 0.0, 0.0, 1.0))


@triton.jit(do_not_specialize_on_alignment=["scales_NbKb", "sums_NbKb3"])
def _quantize_weight(
    weight_NK,
    codes_NK,
    scales_NbKb,
    sums_NbKb3,
    N,
    K,
    weight_row,
    weight_column,
    codes_row,
    scales_row,
    POW2: tl.constexpr,
    SHORT: tl.constexpr,
    HARDWARE: tl.constexpr,
    EVEN: tl.constexpr,
    SUMS: tl.constexpr,
    EARLY: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One program, one block of 128x128."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    column_blocks = tl.cdiv(K, SIZE)
    row_block = (tl.program_id(0) // column_blocks).to(tl.int64)
    column_block = tl.program_id(0) % column_blocks
    rows = row_block * SIZE + tl.arange(0, SIZE)[:, None]
    columns = column_block * SIZE + tl.arange(0, SIZE)[None, :]
    if EVEN:
        inside = None
        x = tl.load(weight_NK + rows * weight_row + columns.to(tl.int64) * weight_column)
    else:
        inside = (rows < N) & (columns < K)
        x = tl.load(
            weight_NK + rows * weight_row + columns.to(tl.int64) * weight_column, mask=inside, other=0.0
        )
    codes_at = codes_NK + rows * codes_row + columns
    scale_at = scales_NbKb + row_block * scales_row + column_block
    sums_at = sums_NbKb3 + (row_block * column_blocks + column_block) * 3
    write_block(x, codes_at, scale_at, sums_at, inside, POW2, SHORT, HARDWARE, SUMS)


def launch(
    weight_NK: Tensor,
    codes_NK: Tensor,
    scales_NbKb: Tensor,
    scale_format: ScaleFormat,
    sums_NbKb3: Tensor | None = None,
    *,
    early: bool = True,
) -> None:
    """Queue the quantization of `weight_NK` (BF16, FP16 or fp32) into `codes_NK` and `scales_NbKb`; waits for nothing.

    A block with NaN or infinity gets a scale that is not finite: the scales are their own flags. The codes' and the scales'
    rows may lie apart, their columns not. `sums_NbKb3`: fp32 `[Nb, Kb, 3]`, takes each block's squared
    quantization error and squared norm, and 1 where a value is not finite, else 0. `early`: be launched before the previous
    kernel of the stream has ended, and wait for its end inside.
    """
    early = early and weight_NK.is_cuda
    rows, columns = weight_NK.shape
    if codes_NK.shape != weight_NK.shape or codes_NK.stride(1) != 1 or scales_NbKb.stride(1) != 1:
        raise ValueError(
            f"quantize_weight: expected codes {list(weight_NK.shape)} with contiguous columns and scales likewise, found "
            f"shape {list(codes_NK.shape)} with strides {codes_NK.stride()} and {scales_NbKb.stride()}"
        )
    # of 16-bit values in one column, Triton 3.7 and its ptxas get the error of a block of one row wrong
    if columns == 1:
        weight_NK = weight_NK.float()
    even = rows % BLOCK == 0 and columns % BLOCK == 0
    _quantize_weight[(blocks(rows) * blocks(columns),)](
        weight_NK,
        codes_NK.view(torch.uint8),
        scales_NbKb,
        scales_NbKb if sums_NbKb3 is None else sums_NbKb3,
        rows,
        columns,
        weight_NK.stride(0),
        weight_NK.stride(1),
        codes_NK.stride(0),
        scales_NbKb.stride(0),
        POW2=scale_format == "pow2",
        SHORT=weight_NK.dtype != torch.float32,
        HARDWARE=weight_NK.is_cuda,
        EVEN=even,
        SUMS=sums_NbKb3 is not None,
        EARLY=early,
        SIZE=BLOCK,
        **programs(weight_NK.dtype, even),
        **({"launch_pdl": True} if early else {}),
    )
