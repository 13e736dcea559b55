# SPDX-License-Identifier: Apache-2.0
"""`reference.quantize_activation` on a GPU in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_fp8ext.kernels.numerics.quantized import Quantized, empty
from vllm_fp8ext.kernels.numerics.reference import BLOCK, ScaleFormat, blocks
from vllm_fp8ext.kernels.numerics.triton_numerics import quantized
from vllm_fp8ext.kernels.runtime.launch import TritonLauncher

GROUPS = 8
"""Groups of 128 columns that a program takes."""
_TOGETHER = 4
"""Tokens that a program takes where there are many."""
_LARGE_M = 8192
"""Programs, each for one token, that are more than a GPU runs at once."""


def large_m(k: int) -> int:
    """Return the number of tokens of `k` columns from which on a program takes several.

    Then less is spent on addresses and scales, and more is loaded at once; with one, a few tokens keep more multiprocessors
    busy.
    """
    return -(-_LARGE_M // parts(k))


def parts(k: int) -> int:
    """Programs that a token's columns take."""
    return -(-blocks(k) // GROUPS)


@triton.jit
def places(first, TOKENS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """Return the work of a program, a row for each group: its token, which group of it, its columns.

    Tokens count from `first` on.
    """
    rows = tl.arange(0, TOKENS * GROUPS)
    groups = tl.program_id(1) * GROUPS + rows % GROUPS
    return first + rows // GROUPS, groups, groups[:, None] * SIZE + tl.arange(0, SIZE)[None, :]


@triton.jit(do_not_specialize=["M", "scales_token", "scales_column"])
def _quantize_activation(
    x_MK,
    codes_MK,
    scales_MKb,
    places_MT,
    K,
    width,
    x_row,
    M,
    scales_token,
    scales_column,
    POW2: tl.constexpr,
    SHORT: tl.constexpr,
    HARDWARE: tl.constexpr,
    EARLY: tl.constexpr,
    PLACES: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One program, `GROUPS` groups of `TOKENS` tokens; written once, or at `PLACES` places."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token, groups, columns = places(tl.program_id(0).to(tl.int64) * TOKENS, TOKENS, GROUPS, SIZE)
    inside = (token < M)[:, None] & (columns < K)
    x = tl.load(x_MK + (token * x_row)[:, None] + columns, mask=inside, other=0.0)
    codes, scale = quantized(x, POW2, SHORT, HARDWARE)
    room = (token < M)[:, None] & (columns < width)
    scaled = (token < M) & (groups < tl.cdiv(K, SIZE))
    if PLACES:
        for choice in tl.static_range(PLACES):
            row = tl.load(places_MT + token * PLACES + choice, mask=token < M, other=-1).to(tl.int64)
            there = row >= 0
            tl.store(codes_MK + (row * width)[:, None] + columns, codes, mask=room & there[:, None])
            tl.store(scales_MKb + row * scales_token + groups * scales_column, scale, mask=scaled & there)
    else:
        tl.store(codes_MK + (token * width)[:, None] + columns, codes, mask=room)
        tl.store(scales_MKb + token * scales_token + groups * scales_column, scale, mask=scaled)


_launch = TritonLauncher(_quantize_activation, registers=128)


def quantize_activation(
    x_MK: Tensor,
    scale_format: ScaleFormat,
    rows: int | None = None,
    *,
    by_token: bool = False,
    width: int | None = None,
) -> Quantized:
    """Codes and scales of `x_MK` (BF16, FP16 or fp32, columns contiguous). `rows`: with room for so many tokens, those behind
    uninitialized. `by_token`: how scales lie (`Quantized`). `width`: columns of the codes, K rounded up to no more than a
    multiple of 128; those behind K are zero."""
    m, k = x_MK.shape
    columns = k if width is None else width
    room = empty(m if rows is None else rows, columns, x_MK.device, by_token=by_token)
    return _quantized(room, x_MK, scale_format, None)


def quantize_into(room: Quantized, x_MK: Tensor, scale_format: ScaleFormat) -> None:
    """The same, into codes and scales that are there."""
    _quantized(room, x_MK, scale_format, None)


def quantize_to_rows(x_MK: Tensor, scale_format: ScaleFormat, rows: int, places_MT: Tensor) -> Quantized:
    """Quantize each token into the rows that `places_MT` names, of `rows` rows.

    `places_MT`: int32, contiguous; -1 names none. Rows that nobody names stay uninitialized.
    """
    return _quantized(empty(rows, x_MK.shape[1], x_MK.device), x_MK, scale_format, places_MT)


def _quantized(
    room: Quantized, x_MK: Tensor, scale_format: ScaleFormat, places_MT: Tensor | None
) -> Quantized:
    (m, k), (codes, scales) = x_MK.shape, room
    early = x_MK.is_cuda
    if m:
        short, places = x_MK.dtype.itemsize == 2, 0 if places_MT is None else places_MT.shape[1]
        tokens = _TOGETHER if m >= large_m(k) else 1
        _launch(
            (-(-m // tokens), parts(k), 1),
            (x_MK, codes.view(torch.uint8), scales, scales if places_MT is None else places_MT),
            (k, codes.shape[1], x_MK.stride(0)),
            (m, *scales.stride()),
            (scale_format == "pow2", short, early, early, places, tokens, GROUPS, BLOCK),
            4,
        )
    return room
