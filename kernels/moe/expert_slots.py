# SPDX-License-Identifier: Apache-2.0
"""Quantizes tokens and lists each expert's slots in one launch, for small M.

A token and the number of one of its experts make a slot; slot `m * T + t` is the t-th expert of token m. Each expert has room
for all of them, so that no expert's list depends on another's.

Shape suffixes: M tokens, K hidden size, T experts of a token, S = M * T slots, E experts here, Kb blocks of 128 columns.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_fp8ext.kernels.numerics.quantized import Quantized, empty
from vllm_fp8ext.kernels.numerics.reference import BLOCK, ScaleFormat, blocks
from vllm_fp8ext.kernels.numerics.triton_numerics import quantized
from vllm_fp8ext.kernels.quantize.quantize_activation import GROUPS

ROOM = 64
"""Multiple of the number of places in an expert's list."""
SCANNED = 1024
"""Slots that a program reads at a time."""


class ExpertSlots(NamedTuple):
    """All int32."""

    slots: Tensor
    """`[E, room]`: the slots of each expert in their order, and uninitialized places behind them."""
    counts: Tensor
    """`[E]`: how many these are."""


@triton.jit
def _list(experts_S, slots_E, counts_E, expert, S, room, SCANNED: tl.constexpr):
    """One expert's slots."""
    before = 0
    for first in range(0, S, SCANNED):
        slots = first + tl.arange(0, SCANNED)
        mine = (tl.load(experts_S + slots, mask=slots < S, other=-1) == expert).to(tl.int32)
        places = before + tl.cumsum(mine, axis=0) - 1
        tl.store(slots_E + expert * room + places, slots, mask=mine > 0)
        before += tl.sum(mine, axis=0)
    tl.store(counts_E + expert, before)


@triton.jit(do_not_specialize=["S", "room", "scales_column"])
def _expert_slots(
    x_MK,
    experts_S,
    codes_MK,
    scales_MKb,
    slots_E,
    counts_E,
    S,
    room,
    K,
    x_row,
    scales_column,
    LISTED: tl.constexpr,
    PARTS: tl.constexpr,
    POW2: tl.constexpr,
    HARDWARE: tl.constexpr,
    EARLY: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    SCANNED: tl.constexpr,
):
    """The first `LISTED` programs list one expert's slots each; the others quantize `GROUPS` groups of one token each."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        # only now: the next kernel reads, before it waits, what is older than this one
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    if program < LISTED:
        _list(experts_S, slots_E, counts_E, program, S, room, SCANNED)
    else:
        token = ((program - LISTED) // PARTS).to(tl.int64)
        groups = (program - LISTED) % PARTS * GROUPS + tl.arange(0, GROUPS)
        columns = groups[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
        x = tl.load(x_MK + token * x_row + columns, mask=columns < K, other=0.0)
        codes, scale = quantized(x, POW2, True, HARDWARE)
        tl.store(codes_MK + token * K + columns, codes, mask=columns < K)
        tl.store(scales_MKb + token + groups * scales_column, scale, mask=groups < tl.cdiv(K, SIZE))


@triton.jit
def taken(slots_E, count, expert, first, S, room, ALONE: tl.constexpr, TOKENS: tl.constexpr):
    """The slots of a block of one expert, from its slot `first` on: S where there is none; and whose activations are read,
    which is then the first's. `ALONE`: `expert` is the one slot instead."""
    lanes = tl.arange(0, TOKENS)
    if ALONE:
        return tl.where(lanes == 0, expert, S), tl.zeros((TOKENS,), tl.int32) + expert
    at = slots_E + expert * room + first
    slots = tl.load(at + lanes)
    here = first + lanes < count
    return tl.where(here, slots, S), tl.where(here, slots, tl.load(at))


@triton.jit
def has_slot(experts_S, expert, S, SCANNED: tl.constexpr):
    """Tell whether a slot goes to the expert."""
    matches = tl.zeros((SCANNED,), tl.int32)
    for first in range(0, S, SCANNED):
        slots = first + tl.arange(0, SCANNED)
        # past the L1 cache, which may hold what lay there before
        chosen = tl.load(experts_S + slots, mask=slots < S, other=-1, cache_modifier=".cg")
        matches |= (chosen == expert).to(tl.int32)
    return tl.max(matches, axis=0) > 0


def expert_slots(
    x_MK: Tensor, experts_MT: Tensor, experts: int, scale_format: ScaleFormat, *, listed: bool = True
) -> tuple[Quantized, ExpertSlots]:
    """Return codes and scales of `x_MK`, and the slots of each expert.

    `x_MK`: BF16 or FP16, columns contiguous, at least one token. `experts_MT`: integers, contiguous. `listed`: false leaves
    the slots uninitialized.

    A kernel that is launched early behind this one may read `experts_MT` before it waits.
    """
    (m, k), s, device = x_MK.shape, experts_MT.numel(), x_MK.device
    codes, scales = empty(m, k, device)
    room = -(-s // ROOM) * ROOM if listed else 0
    slots = torch.empty(experts, room, dtype=torch.int32, device=device)
    counts = torch.empty(experts, dtype=torch.int32, device=device)
    first, parts, early = experts if listed else 0, -(-blocks(k) // GROUPS), x_MK.is_cuda
    _expert_slots[(first + m * parts,)](
        *(x_MK, experts_MT, codes.view(torch.uint8), scales, slots, counts),
        *(s, room, k, x_MK.stride(0), scales.stride(1)),
        LISTED=first,
        PARTS=parts,
        POW2=scale_format == "pow2",
        HARDWARE=early,
        EARLY=early,
        GROUPS=GROUPS,
        SIZE=BLOCK,
        SCANNED=SCANNED,
        num_warps=4,
        **({"launch_pdl": True} if early else {}),
    )
    return Quantized(codes, scales), ExpertSlots(slots, counts)
