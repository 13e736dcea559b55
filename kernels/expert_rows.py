# SPDX-License-Identifier: Apache-2.0
"""Brings the tokens of each expert together: which row of a grouped GEMM takes which token.

A token and the number of one of its experts make a slot; slot `m * T + t` is the t-th expert of token m. Rows lie ordered by
expert, and within an expert by slot; each expert's rows begin at a multiple of `align`. Where a slot's expert is negative,
another rank has it, and it has no row.

Shape suffixes: M tokens, T experts of a token, S = M * T slots, E experts here, R rows, B = R / align blocks of rows.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

SMALL, CHUNK = 64, 256
"""Slots of a program: few, or more. Up to `CHUNK` need one launch, more need two."""
NOBODY = 1 << 30
"""Instead of a slot, where a row only pads its expert's rows."""
_COUNTED = 32
"""Chunks whose counts are added at once."""


class Rows(NamedTuple):
    """All int32."""

    slots: Tensor
    """`[R]`: the slot of each row that is in use, or `NOBODY`."""
    owners: Tensor
    """`[B]`: the expert of each block of rows, -1 beyond the last one in use."""
    places: Tensor
    """`[S]`: the row of each slot, -1 without one."""
    ends: Tensor
    """`[E]`: where each expert's rows end, without padding."""
    used: Tensor
    """`[1]`: rows in use, padding included."""


def capacity(slots: int, experts: int, align: int) -> int:
    """R: rows that so many slots can need at most."""
    return -(-(slots + min(slots, experts) * (align - 1)) // align) * align


def expert_rows_reference(experts_MT: Tensor, experts: int, align: int) -> Rows:
    """What the kernel computes; what it leaves undefined, the slots of rows beyond those in use, is `NOBODY` here."""
    flat = experts_MT.flatten().tolist()
    r = capacity(len(flat), experts, align)
    slots, owners = [NOBODY] * r, [-1] * (r // align)
    places, ends = [-1] * len(flat), []
    row = 0
    for expert in range(experts):
        row = -(-row // align) * align
        for slot, chosen in enumerate(flat):
            if chosen == expert:
                slots[row], places[slot], owners[row // align] = slot, row, expert
                row += 1
        ends.append(row)
    used = -(-row // align) * align
    device = experts_MT.device
    found = (slots, owners, places, ends, [used])
    return Rows(*(torch.tensor(part, dtype=torch.int32, device=device) for part in found))


@triton.jit(do_not_specialize=["S"])
def _count(experts_S, counts_CE, S, E, EXPERTS: tl.constexpr, EARLY: tl.constexpr, SIZE: tl.constexpr):
    """One program, one chunk: how many of its slots each expert has."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk = tl.program_id(0)
    at = chunk * SIZE + tl.arange(0, SIZE)
    chosen = tl.load(experts_S + at, mask=at < S, other=-1).to(tl.int32)
    experts = tl.arange(0, EXPERTS)
    counts = tl.sum((chosen[:, None] == experts[None, :]).to(tl.int32), axis=0)
    tl.store(counts_CE + chunk * E + experts, counts, mask=experts < E)


@triton.jit(do_not_specialize=["S", "B", "C"])
def _place(
    experts_S,
    counts_CE,
    slots_R,
    owners_B,
    places_S,
    ends_E,
    used,
    S,
    B,
    C,
    E,
    ALIGN: tl.constexpr,
    ALIGN_POW2: tl.constexpr,
    EXPERTS: tl.constexpr,
    COUNTED: tl.constexpr,
    NOBODY: tl.constexpr,
    MANY: tl.constexpr,
    EARLY: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One program, one chunk; the first also says what holds for all of them."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk = tl.program_id(0)
    local = tl.arange(0, SIZE)
    slot = chunk * SIZE + local
    chosen = tl.load(experts_S + slot, mask=slot < S, other=-1).to(tl.int32)
    experts = tl.arange(0, EXPERTS)
    owned = chosen[:, None] == experts[None, :]
    if MANY:
        total = tl.zeros((EXPERTS,), tl.int32)
        before = tl.zeros((EXPERTS,), tl.int32)
        for first in range(0, C, COUNTED):
            chunks = first + tl.arange(0, COUNTED)
            inside = (chunks < C)[:, None] & (experts < E)[None, :]
            counts = tl.load(counts_CE + chunks[:, None] * E + experts[None, :], mask=inside, other=0)
            total += tl.sum(counts, axis=0)
            before += tl.sum(tl.where((chunks < chunk)[:, None], counts, 0), axis=0)
    else:
        total = tl.sum(owned.to(tl.int32), axis=0)
        before = tl.zeros((EXPERTS,), tl.int32)
    padded = (total + ALIGN - 1) // ALIGN * ALIGN
    stop = tl.cumsum(padded, axis=0)
    start = stop - padded
    earlier = (chosen[:, None] == chosen[None, :]) & (local[:, None] > local[None, :])
    place = tl.sum(tl.where(owned, (start + before)[None, :], 0), axis=1) + tl.sum(
        earlier.to(tl.int32), axis=1
    )
    here = (chosen >= 0) & (chosen < E)
    tl.store(places_S + slot, tl.where(here, place, -1), mask=slot < S)
    tl.store(slots_R + place, slot, mask=here)
    if chunk == 0:
        behind = tl.arange(0, ALIGN_POW2)
        padding = (start + total)[:, None] + behind[None, :]
        tl.store(slots_R + padding, tl.full(padding.shape, NOBODY, tl.int32), mask=padding < stop[:, None])
        tl.store(ends_E + experts, start + total, mask=experts < E)
        rows = tl.sum(padded, axis=0)
        tl.store(used, rows)
        for first in range(0, B, SIZE):
            block = first + local
            owner = tl.sum((stop[None, :] <= (block * ALIGN)[:, None]).to(tl.int32), axis=1)
            tl.store(owners_B + block, tl.where(block * ALIGN < rows, owner, -1), mask=block < B)


def expert_rows(experts_MT: Tensor, experts: int, align: int) -> Rows:
    """Rows for the experts (integers, contiguous) that each token goes to, in one launch or two."""
    s, device = experts_MT.numel(), experts_MT.device
    r = capacity(s, experts, align)
    sizes = {"slots": r, "owners": r // align, "places": s, "ends": experts, "used": 1}
    rows = Rows(**{n: torch.empty(size, dtype=torch.int32, device=device) for n, size in sizes.items()})
    size = SMALL if s <= SMALL else CHUNK
    chunks = max(1, -(-s // size))
    width = max(16, triton.next_power_of_2(experts))
    counts = rows.ends
    early = experts_MT.is_cuda
    common = {"EXPERTS": width, "EARLY": early, "SIZE": size, "num_warps": 8 if size == CHUNK else 4}
    common |= {"launch_pdl": True} if early else {}
    if chunks > 1:
        counts = torch.empty(chunks, experts, dtype=torch.int32, device=device)
        _count[(chunks,)](experts_MT, counts, s, experts, **common)
    _place[(chunks,)](
        *(experts_MT, counts, *rows, s, r // align, chunks, experts),
        ALIGN=align,
        ALIGN_POW2=triton.next_power_of_2(align),
        COUNTED=_COUNTED,
        NOBODY=NOBODY,
        MANY=chunks > 1,
        **common,
    )
    return rows
