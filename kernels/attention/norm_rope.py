# SPDX-License-Identifier: Apache-2.0
"""Norm, rotary embedding and quantization between the QKV projection and attention, in one launch.

The RMSNorm of each head is there where a model has it, the quantization of queries where attention takes them in FP8.

Shape suffixes: M tokens, H query heads, G KV heads, D head dimension, P positions.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_fp8ext.kernels.attention.position_sections import PositionSections
from vllm_fp8ext.kernels.numerics.reference import FP8_DTYPE
from vllm_fp8ext.kernels.numerics.triton_numerics import encoded, rounded
from vllm_fp8ext.kernels.runtime.launch import TritonLauncher

HEADS = 8
"""Heads that a program takes."""


class NormWeights(NamedTuple):
    """RMSNorm of every head: weights `[D]` of queries and of keys."""

    query_D: Tensor
    key_D: Tensor
    epsilon: float


def norm_rope_reference(
    qkv_MN: Tensor,
    positions_M: Tensor,
    cos_sin_PD: Tensor,
    norms: NormWeights | None,
    q_scale: Tensor | None,
    heads: int,
    kv_heads: int,
    sections: PositionSections | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute what the kernel does: vLLM's RMSNorm (`vllm/ir/ops/layernorm.py`: fp32, rounded before the weight and after
    it), its rotary embedding with halves (`RotaryEmbedding.forward_static`, Neox style) in fp32, rounded once, and its
    `QuantFP8` with a given scale (times the reciprocal, clamped). With `sections` positions are `[3, M]`, and each column is
    turned by its own, as `MRotaryEmbedding.forward_native` does. Returns queries `[M, H, D]` and keys `[M, G, D]`."""
    size = cos_sin_PD.shape[1]
    if sections is None:
        rows_MD = cos_sin_PD[positions_M]
    else:
        columns = torch.arange(size, device=cos_sin_PD.device)
        rows_MD = cos_sin_PD[positions_M[sections.axes() * 2].T, columns]
    cos_M1D, sin_M1D = rows_MD.float().unsqueeze(1).chunk(2, dim=-1)
    queries, keys, _ = qkv_MN.split([heads * size, kv_heads * size, kv_heads * size], dim=-1)

    def turned(part: Tensor, weight_D: Tensor | None) -> Tensor:
        x = part.unflatten(-1, (-1, size)).float()
        if weight_D is not None:
            assert norms is not None
            x = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + norms.epsilon)
            x = (x.to(weight_D.dtype) * weight_D).to(part.dtype).float()
        low, high = x.chunk(2, dim=-1)
        return torch.cat((low * cos_M1D - high * sin_M1D, high * cos_M1D + low * sin_M1D), -1).to(part.dtype)

    query_MHD, key_MGD = turned(queries, norms and norms.query_D), turned(keys, norms and norms.key_D)
    if q_scale is not None:
        inverse_H1 = q_scale.reciprocal().expand(kv_heads).repeat_interleave(heads // kv_heads)[:, None]
        query_MHD = (query_MHD.float() * inverse_H1).clamp(-448, 448).to(FP8_DTYPE)
    return query_MHD, key_MGD


@triton.jit
def _norm_rope(
    qkv_MN,
    positions_M,
    cos_sin_PD,
    q_norm_D,
    k_norm_D,
    q_scale,
    query_MHD,
    key_MGD,
    row,
    cos_sin_row,
    position_row,
    epsilon,
    H: tl.constexpr,
    G: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    SCALES: tl.constexpr,
    HARDWARE: tl.constexpr,
    EARLY: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """One program, `HEADS` heads of one token, of the queries' and then the keys'. `SCALES` of the queries: none, one, or one
    for each KV head. `HEIGHT` and `WIDTH` of the columns that turn by these positions: both 0 where a token has one."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    half = tl.arange(0, HALF)
    of_query = heads < H
    # nothing that a step's kernels write: positions come with the step, the others with the model
    place = tl.load(positions_M + token).to(tl.int64)
    if HEIGHT + WIDTH > 0:
        if INTERLEAVED:
            of_height = (half % 3 == 1) & (half < 3 * HEIGHT)
            of_width = (half % 3 == 2) & (half < 3 * WIDTH)
        else:
            of_width = half >= HALF - WIDTH
            of_height = (half >= HALF - WIDTH - HEIGHT) & (half < HALF - WIDTH)
        height = tl.load(positions_M + position_row + token).to(tl.int64)
        width = tl.load(positions_M + 2 * position_row + token).to(tl.int64)
        place = tl.where(of_width, width, tl.where(of_height, height, place))
    cos = tl.load(cos_sin_PD + place * cos_sin_row + half).to(tl.float32)[None, :]
    sin = tl.load(cos_sin_PD + place * cos_sin_row + HALF + half).to(tl.float32)[None, :]
    if NORM:
        q_low, q_high = tl.load(q_norm_D + half), tl.load(q_norm_D + HALF + half)
        k_low, k_high = tl.load(k_norm_D + half), tl.load(k_norm_D + HALF + half)
    if SCALES:
        head = tl.where(of_query, heads // (H // G), 0) if SCALES > 1 else heads * 0
        by = tl.div_rn(1.0, tl.load(q_scale + head))[:, None]
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    inside = (heads < H + G)[:, None]
    columns = heads[:, None] * (2 * HALF) + half[None, :]
    low = tl.load(qkv_MN + token * row + columns, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(qkv_MN + token * row + columns + HALF, mask=inside, other=0.0).to(tl.float32)
    dtype = qkv_MN.dtype.element_ty
    if NORM:
        mean = (tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / (2 * HALF)
        inverse = tl.div_rn(1.0, tl.sqrt_rn(mean + epsilon))[:, None]
        weight_dtype = q_norm_D.dtype.element_ty
        by_low = tl.where(of_query[:, None], q_low[None, :], k_low[None, :]).to(tl.float32)
        by_high = tl.where(of_query[:, None], q_high[None, :], k_high[None, :]).to(tl.float32)
        low = rounded(rounded(low * inverse, weight_dtype, HARDWARE) * by_low, dtype, HARDWARE)
        high = rounded(rounded(high * inverse, weight_dtype, HARDWARE) * by_high, dtype, HARDWARE)
    # products of two BF16 values are exact, so it is no matter whether they are fused with the sums
    first = rounded(low * cos - high * sin, dtype, HARDWARE)
    second = rounded(high * cos + low * sin, dtype, HARDWARE)
    to_query, to_key = of_query[:, None], inside & (heads >= H)[:, None]
    query = query_MHD + token * (H * 2 * HALF) + columns
    if SCALES:
        tl.store(query, encoded(first * by, HARDWARE), mask=to_query)
        tl.store(query + HALF, encoded(second * by, HARDWARE), mask=to_query)
    else:
        tl.store(query, first.to(dtype), mask=to_query)
        tl.store(query + HALF, second.to(dtype), mask=to_query)
    key = key_MGD + token * (G * 2 * HALF) + columns - H * 2 * HALF
    tl.store(key, first.to(dtype), mask=to_key)
    tl.store(key + HALF, second.to(dtype), mask=to_key)


_launch = TritonLauncher(_norm_rope)


def norm_rope(
    qkv_MN: Tensor,
    positions_M: Tensor,
    cos_sin_PD: Tensor,
    norms: NormWeights | None,
    q_scale: Tensor | None,
    heads: int,
    kv_heads: int,
    sections: PositionSections | None = None,
) -> tuple[Tensor, Tensor]:
    """Return queries `[M, H, D]` and keys `[M, G, D]`.

    Queries are E4M3 with a `q_scale`: fp32, one or one for each KV head.

    `qkv_MN`: BF16 or FP16, columns contiguous, heads of the queries, the keys, the values. `cos_sin_PD`: cosines, then sines,
    D a power of two; a position that is not in it is not looked for. `positions_M`: with `sections` it is `[3, M]`, rows
    contiguous. All else is contiguous.

    In a step all kernels from the first layer's on may begin before those ahead have ended. So what is read here before the
    wait, all but `qkv_MN`, must have been there before the step, not only before the kernel ahead.
    """
    (m, _), size, device = qkv_MN.shape, cos_sin_PD.shape[1], qkv_MN.device
    query = torch.empty(m, heads, size, dtype=qkv_MN.dtype if q_scale is None else FP8_DTYPE, device=device)
    key = torch.empty(m, kv_heads, size, dtype=qkv_MN.dtype, device=device)
    early = qkv_MN.is_cuda
    if m:
        none = cos_sin_PD  # stands for what there is not
        q_norm, k_norm, epsilon = (none, none, 0.0) if norms is None else norms
        position_row, by_axis = 0, (0, 0, False)
        if sections is not None:
            position_row, by_axis = positions_M.stride(0), sections[1:]
        _launch(
            (m, -(-(heads + kv_heads) // HEADS), 1),
            (
                *(qkv_MN, positions_M, cos_sin_PD, q_norm, k_norm, none if q_scale is None else q_scale),
                *(query if q_scale is None else query.view(torch.uint8), key),
            ),
            (qkv_MN.stride(0), cos_sin_PD.stride(0), position_row),
            (epsilon,),
            (
                *(heads, kv_heads, size // 2, HEADS, norms is not None),
                *(0 if q_scale is None else q_scale.numel(), early, early, *by_axis),
            ),
            4,
        )
    return query, key
