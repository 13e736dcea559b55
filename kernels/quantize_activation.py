# SPDX-License-Identifier: Apache-2.0
"""`reference.quantize_activation` on a GPU in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_fp8ext.kernels.launch import Launcher
from vllm_fp8ext.kernels.quantized import Quantized, empty
from vllm_fp8ext.kernels.reference import BLOCK, ScaleFormat, blocks
from vllm_fp8ext.kernels.triton_numerics import codes_of, magnitude_bits, scale_of

GROUPS = 8
"""Groups of 128 columns that a program takes."""


@triton.jit
def quantized_groups(
    x_MK,
    token,
    part,
    K,
    x_row,
    POW2: tl.constexpr,
    SHORT: tl.constexpr,
    HARDWARE: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Part `part` of a token, `GROUPS` groups: codes, scales, and the columns that these belong to."""
    groups = part * GROUPS + tl.arange(0, GROUPS)
    columns = groups[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x = tl.load(x_MK + token * x_row + columns, mask=columns < K, other=0.0).to(tl.float32)
    scale = scale_of(tl.max(magnitude_bits(x), axis=1), POW2)
    return codes_of(x, scale[:, None], SHORT, HARDWARE), scale, groups, columns


@triton.jit(do_not_specialize=["scales_token", "scales_column"])
def _quantize_activation(
    x_MK,
    codes_MK,
    scales_MKb,
    places_MT,
    K,
    x_row,
    scales_token,
    scales_column,
    POW2: tl.constexpr,
    SHORT: tl.constexpr,
    HARDWARE: tl.constexpr,
    EARLY: tl.constexpr,
    PLACES: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One program, `GROUPS` groups of one token; written once, or at `PLACES` places."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    codes, scale, groups, columns = quantized_groups(
        x_MK, token, tl.program_id(1), K, x_row, POW2, SHORT, HARDWARE, GROUPS, SIZE
    )
    inside = columns < K
    scaled = groups < tl.cdiv(K, SIZE)
    if PLACES:
        for choice in tl.static_range(PLACES):
            row = tl.load(places_MT + token * PLACES + choice).to(tl.int64)
            tl.store(codes_MK + row * K + columns, codes, mask=inside & (row >= 0))
            tl.store(
                scales_MKb + row * scales_token + groups * scales_column, scale, mask=scaled & (row >= 0)
            )
    else:
        tl.store(codes_MK + token * K + columns, codes, mask=inside)
        tl.store(scales_MKb + token * scales_token + groups * scales_column, scale, mask=scaled)


_launch = Launcher(_quantize_activation)


def quantize_activation(
    x_MK: Tensor, scale_format: ScaleFormat, rows: int | None = None, *, by_token: bool = False
) -> Quantized:
    """Codes and scales of `x_MK` (BF16, FP16 or fp32, columns contiguous). `rows`: with room for so many tokens, those behind
    uninitialized. `by_token`: how scales lie (`Quantized`)."""
    m, k = x_MK.shape
    room = empty(m if rows is None else rows, k, x_MK.device, by_token=by_token)
    return _quantized(room, x_MK, scale_format, None)


def quantize_into(room: Quantized, x_MK: Tensor, scale_format: ScaleFormat) -> None:
    """The same, into codes and scales that are there."""
    _quantized(room, x_MK, scale_format, None)


def quantize_to_rows(x_MK: Tensor, scale_format: ScaleFormat, rows: int, places_MT: Tensor) -> Quantized:
    """The same, each token written to the rows that `places_MT` (int32, contiguous) names, of so many; -1 names none. Rows
    that nobody names stay uninitialized."""
    return _quantized(empty(rows, x_MK.shape[1], x_MK.device), x_MK, scale_format, places_MT)


def _quantized(
    room: Quantized, x_MK: Tensor, scale_format: ScaleFormat, places_MT: Tensor | None
) -> Quantized:
    (m, k), (codes, scales) = x_MK.shape, room
    early = x_MK.is_cuda
    if m:
        short, places = x_MK.dtype.itemsize == 2, 0 if places_MT is None else places_MT.shape[1]
        _launch(
            (m, -(-blocks(k) // GROUPS), 1),
            (x_MK, codes.view(torch.uint8), scales, scales if places_MT is None else places_MT),
            (k, x_MK.stride(0)),
            scales.stride(),
            (scale_format == "pow2", short, early, early, places, GROUPS, BLOCK),
            4,
        )
    return room
