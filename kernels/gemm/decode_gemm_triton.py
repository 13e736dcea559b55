# SPDX-License-Identifier: Apache-2.0
"""`decode_gemm` in Triton: slower, but portable and readable, and it runs in Triton's interpreter.

Each program quantizes the activations that it needs; programs that share a tile of weights' rows take consecutive parts of
K, and a second launch adds their partial sums in order.
"""

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_fp8ext.kernels.numerics.reference import BLOCK, ScaleFormat, blocks
from vllm_fp8ext.kernels.numerics.triton_numerics import quantized, rounded


@dataclasses.dataclass(frozen=True, kw_only=True)
class TritonTileConfig:
    """Tile sizes of one GEMM."""

    rows: int = 128
    """Weight rows of a program: 64 or 128, so that they share one scale."""
    splits: int = 1
    """Parts of K."""
    stages: int = 4
    """Blocks of 128 columns in flight."""
    warps: int = 4


@triton.jit
def _decode_gemm(
    x_MK,
    codes_NK,
    scales_NbKb,
    bias_N,
    out_SMN,
    M,
    N,
    K,
    x_row,
    codes_row,
    POW2: tl.constexpr,
    BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    SIZE: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """One program: `ROWS` rows of weights, one part of K, all tokens. Weights are the left operand: tensor cores want 64
    rows there, and take few columns."""
    tile, split = tl.program_id(0), tl.program_id(1)
    column_blocks = tl.cdiv(K, SIZE)
    tokens = tl.arange(0, TOKENS)
    rows = tile * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, SIZE)
    x_at = x_MK + tokens[:, None] * x_row
    codes_at = codes_NK + rows.to(tl.int64)[:, None] * codes_row
    scales_at = scales_NbKb + (tile * ROWS // SIZE) * column_blocks
    sums = tl.zeros((ROWS, TOKENS), tl.float32)
    for block in range(split * column_blocks // SPLITS, (split + 1) * column_blocks // SPLITS):
        here = block * SIZE + columns
        weight = tl.load(codes_at + here[None, :], mask=(rows < N)[:, None] & (here < K)[None, :], other=0)
        x = tl.load(x_at + here[None, :], mask=(tokens < M)[:, None] & (here < K)[None, :], other=0.0).to(
            tl.float32
        )
        codes, scale = quantized(x, POW2, True, HARDWARE)
        codes = tl.trans(codes.to(tl.float8e4nv, bitcast=True))
        product = tl.dot(weight.to(tl.float8e4nv, bitcast=True), codes)
        sums += product * (scale * tl.load(scales_at + block))[None, :]
    out = out_SMN + split.to(tl.int64) * M * N + tokens[None, :] * N + rows[:, None]
    inside = (rows < N)[:, None] & (tokens < M)[None, :]
    if BIAS:
        sums += tl.load(bias_N + rows, mask=rows < N, other=0.0).to(tl.float32)[:, None]
    if SPLITS == 1:
        sums = rounded(sums, out_SMN.dtype.element_ty, HARDWARE)
    tl.store(out, sums.to(out_SMN.dtype.element_ty), mask=inside)


@triton.jit
def _add_splits(
    parts_SMN,
    bias_N,
    out_MN,
    M,
    N,
    BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    SIZE: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """One program: `SIZE` outputs of one token, their parts added in the order of the splits."""
    token = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    at = parts_SMN + token * N + columns
    total = tl.load(at, mask=columns < N, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(at + split * M * N, mask=columns < N, other=0.0)
    if BIAS:
        total += tl.load(bias_N + columns, mask=columns < N, other=0.0).to(tl.float32)
    total = rounded(total, out_MN.dtype.element_ty, HARDWARE)
    tl.store(out_MN + token * N + columns, total.to(out_MN.dtype.element_ty), mask=columns < N)


def decode_gemm_triton(
    x_MK: Tensor,
    codes_NK: Tensor,
    scales_NbKb: Tensor,
    bias_N: Tensor | None,
    scale_format: ScaleFormat,
    config: TritonTileConfig,
) -> Tensor:
    """Multiply: `x @ weight.T (+ bias)`, `[M, N]` in the dtype of `x_MK`.

    `x_MK`: BF16 or FP16, columns contiguous, quantized as `reference.quantize_activation` does. Scales are contiguous.
    """
    m, (n, k) = x_MK.shape[0], codes_NK.shape
    out = torch.empty(m, n, dtype=x_MK.dtype, device=x_MK.device)
    splits = min(config.splits, blocks(k))
    parts = out
    if splits > 1:
        parts = torch.empty(splits, m, n, dtype=torch.float32, device=x_MK.device)
    hardware = x_MK.is_cuda
    bias = out if bias_N is None else bias_N
    _decode_gemm[(-(-n // config.rows), splits)](
        x_MK,
        codes_NK.view(torch.uint8),
        scales_NbKb,
        bias,
        parts,
        m,
        n,
        k,
        x_MK.stride(0),
        codes_NK.stride(0),
        POW2=scale_format == "pow2",
        BIAS=bias_N is not None and splits == 1,
        TOKENS=max(16, triton.next_power_of_2(m)),
        ROWS=config.rows,
        SPLITS=splits,
        SIZE=BLOCK,
        HARDWARE=hardware,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    if splits > 1:
        width = 1024
        _add_splits[(-(-n // width), m)](
            parts,
            bias,
            out,
            m,
            n,
            BIAS=bias_N is not None,
            SPLITS=splits,
            SIZE=width,
            HARDWARE=hardware,
            num_warps=4,
        )
    return out
