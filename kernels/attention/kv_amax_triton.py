# SPDX-License-Identifier: Apache-2.0
"""`kv_amax` on a GPU: K, V and Q of one layer in one launch, each element read once."""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_fp8ext.kernels.numerics.reference import FP8_DTYPE
from vllm_fp8ext.kernels.numerics.triton_numerics import magnitude_bits

if TYPE_CHECKING:
    from vllm_fp8ext.kernels.attention.kv_amax import AmaxTally

_TILE = 1 << 12
"""Elements that a program reads at a time."""


@triton.jit
def _seen(
    x_TGW,
    x_token,
    x_head,
    slots_T,
    T,
    scale,
    amax_P,
    saturated_P,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    CODES: tl.constexpr,
):
    """Reads this program's tiles of one head and adds to its own sums; returns how many tokens were no padding."""
    columns = tl.arange(0, PADDED)
    top = tl.zeros([TOKENS, PADDED], tl.int32)
    over = tl.zeros([TOKENS, PADDED], tl.int32)
    count = tl.zeros([TOKENS], tl.int32)
    for start in range(tl.program_id(0) * TOKENS, T, tl.num_programs(0) * TOKENS):
        tokens = start + tl.arange(0, TOKENS)
        here = tl.load(slots_T + tokens, mask=tokens < T, other=-1) >= 0
        x = tl.load(
            x_TGW + tokens.to(tl.int64)[:, None] * x_token + tl.program_id(1) * x_head + columns[None, :],
            mask=here[:, None] & (columns < WIDTH)[None, :],
            other=0,
        )
        if CODES:
            bits = (x & 0x7F).to(tl.int32)
            over += (bits >= 0x7E).to(tl.int32)
        else:
            values = x.to(tl.float32)
            bits = magnitude_bits(values)
            over += 1 - (tl.abs(values) <= scale * 448.0).to(tl.int32)  # NaN, too
        top = tl.maximum(top, bits)
        count += here.to(tl.int32)
    bits = tl.max(tl.max(top, axis=1), axis=0)
    if CODES:
        # 1.mmm * 2^(e - 7), or mmm / 8 * 2^-6
        fraction = (bits & 7).to(tl.float32) * 0.125
        power = ((tl.maximum(bits >> 3, 1) + 120) << 23).to(tl.float32, bitcast=True)
        amax = tl.where(bits >> 3 > 0, fraction + 1.0, fraction) * power
        amax = tl.where(bits == 0x7E, 896.0, tl.where(bits == 0x7F, float("nan"), amax))
        bits = magnitude_bits(amax * scale)
    before = magnitude_bits(tl.load(amax_P))
    tl.store(amax_P, tl.maximum(before, bits).to(tl.float32, bitcast=True))
    tl.store(saturated_P, tl.load(saturated_P) + tl.sum(tl.sum(over, axis=1), axis=0))
    return tl.sum(count, axis=0)


@triton.jit(
    do_not_specialize=["T"], do_not_specialize_on_alignment=["slots_T", "k_scale", "v_scale", "q_scale"]
)
def _kv_amax(
    k_TGW,
    v_TGW,
    q_TGW,
    slots_T,
    T,
    k_scale,
    v_scale,
    q_scale,
    amax_3GP,
    saturated_3GP,
    tokens_P,
    k_token,
    k_head,
    v_token,
    v_head,
    q_token,
    q_head,
    K_PER_HEAD: tl.constexpr,
    V_PER_HEAD: tl.constexpr,
    Q_PER_HEAD: tl.constexpr,
    K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    Q_WIDTH: tl.constexpr,
    K_PADDED: tl.constexpr,
    V_PADDED: tl.constexpr,
    Q_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    CODES: tl.constexpr,
):
    """One program: the tiles `p`, `p + P`, … of one head of K, of V or of Q."""
    program, head, side = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = (side * tl.num_programs(1) + head) * tl.num_programs(0) + program
    amax_P, saturated_P = amax_3GP + slot, saturated_3GP + slot
    if side == 0:
        scale = tl.load(k_scale + head * K_PER_HEAD)
        tokens = _seen(
            k_TGW,
            k_token,
            k_head,
            slots_T,
            T,
            scale,
            amax_P,
            saturated_P,
            K_WIDTH,
            K_PADDED,
            max(1, TILE // K_PADDED),
            False,
        )
        if head == 0:
            tl.store(tokens_P + program, tl.load(tokens_P + program) + tokens)
    elif side == 1:
        scale = tl.load(v_scale + head * V_PER_HEAD)
        _seen(
            v_TGW,
            v_token,
            v_head,
            slots_T,
            T,
            scale,
            amax_P,
            saturated_P,
            V_WIDTH,
            V_PADDED,
            max(1, TILE // V_PADDED),
            False,
        )
    else:
        scale = tl.load(q_scale + head * Q_PER_HEAD)
        _seen(
            q_TGW,
            q_token,
            q_head,
            slots_T,
            T,
            scale,
            amax_P,
            saturated_P,
            Q_WIDTH,
            Q_PADDED,
            max(1, TILE // Q_PADDED),
            CODES,
        )


def launch(
    tally: "AmaxTally",
    values_TGW: tuple[Tensor, Tensor, Tensor],
    slots_T: Tensor,
    scales: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Queue what `AmaxTally.add` adds on the current stream."""
    codes = values_TGW[2].dtype == FP8_DTYPE
    k, v, q = values_TGW
    _, heads, programs = tally.amax_3GP.shape
    widths = [part.shape[2] for part in values_TGW]
    _kv_amax[(programs, heads, 3)](
        k,
        v,
        q.view(torch.uint8) if codes else q,
        slots_T,
        len(slots_T),
        *scales,
        tally.amax_3GP,
        tally.saturated_3GP,
        tally.tokens_P,
        *(stride for part in values_TGW for stride in part.stride()[:2]),
        *(int(scale.numel() > 1) for scale in scales),
        *widths,
        *(triton.next_power_of_2(width) for width in widths),
        TILE=_TILE,
        CODES=codes,
        num_warps=4,
    )
