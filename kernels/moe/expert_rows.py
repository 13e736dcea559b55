# SPDX-License-Identifier: Apache-2.0
"""Brings the tokens of each expert together: which row of a grouped GEMM takes which token.

A token and the number of one of its experts make a slot; slot `m * T + t` is the t-th expert of token m. Rows lie ordered by
expert, and within an expert by slot; each expert's rows begin at a multiple of `align`. Where a slot's expert is negative,
another rank has it, and it has no row.

Each launch has a program for every expert and chunk of slots, which reads the chunk once: what counts beside the GEMMs is the
latency of few dependent loads, and little code, which the GPU fetches anew each time.

Shape suffixes: M tokens, T experts of a token, S = M * T slots, C chunks, E experts here, R rows, B = R / align blocks.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_fp8ext.kernels.runtime.launch import TritonLauncher

SMALL, CHUNK = 512, 4096
"""Slots of a program: where there are few, or more."""
NOBODY = 1 << 30
"""Instead of a slot, where a row only pads its expert's rows."""
_COUNTED = 16
"""Chunks whose counts are added at once."""


class ExpertRows(NamedTuple):
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


def expert_rows_reference(experts_MT: Tensor, experts: int, align: int) -> ExpertRows:
    """Compute what the kernel does.

    What it leaves undefined, the slots of rows beyond those in use, is `NOBODY` here.
    """
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
    fields = (slots, owners, places, ends, [used])
    return ExpertRows(*(torch.tensor(part, dtype=torch.int32, device=device) for part in fields))


@triton.jit(do_not_specialize=["S"])
def _count(experts_S, counts_CE, E, S, EARLY: tl.constexpr, SIZE: tl.constexpr):
    """One program: how many of a chunk's slots go to one expert."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert, chunk = tl.program_id(0), tl.program_id(1)
    at = chunk * SIZE + tl.arange(0, SIZE)
    chosen = tl.load(experts_S + at, mask=at < S, other=-1)
    tl.store(counts_CE + chunk * E + expert, tl.sum((chosen == expert).to(tl.int32), axis=0))


@triton.jit
def _fill(at, start, stop, value, SIZE: tl.constexpr):
    """Write `value` to `at[start:stop]`."""
    for first in range(start, stop, SIZE):
        here = first + tl.arange(0, SIZE)
        tl.store(at + here, tl.zeros((SIZE,), tl.int32) + value, mask=here < stop)


@triton.jit(do_not_specialize=["S", "B", "C"])
def _place(
    experts_S,
    counts_CE,
    slots_R,
    owners_B,
    places_S,
    ends_E,
    used,
    E,
    S,
    B,
    C,
    ALIGN: tl.constexpr,
    EXPERTS: tl.constexpr,
    COUNTED: tl.constexpr,
    NOBODY: tl.constexpr,
    EARLY: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One program: the rows of a chunk's slots that go to one expert. The program of an expert's first chunk also says what
    holds for all of its rows."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert, chunk = tl.program_id(0), tl.program_id(1)
    slots = chunk * SIZE + tl.arange(0, SIZE)
    chosen = tl.load(experts_S + slots, mask=slots < S, other=E)
    experts = tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), tl.int32)
    before = tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, C, COUNTED):
        chunks = first + tl.arange(0, COUNTED)
        inside = (chunks < C)[:, None] & (experts < E)[None, :]
        counts = tl.load(counts_CE + chunks[:, None] * E + experts[None, :], mask=inside, other=0)
        total += tl.sum(counts, axis=0)
        before += tl.sum(tl.where((chunks < chunk)[:, None], counts, 0), axis=0)
    padded = (total + ALIGN - 1) // ALIGN * ALIGN
    start = tl.sum(tl.where(experts < expert, padded, 0), axis=0)
    mine = chosen == expert
    first_row = start + tl.sum(tl.where(experts == expert, before, 0), axis=0)
    rows = first_row + tl.cumsum(mine.to(tl.int32), axis=0) - 1
    tl.store(places_S + slots, rows, mask=mine)
    tl.store(slots_R + rows, slots, mask=mine)
    if expert == 0:
        nowhere = (chosen < 0) | (chosen >= E)
        tl.store(places_S + slots, tl.full((SIZE,), -1, tl.int32), mask=nowhere & (slots < S))
    if chunk == 0:
        end = start + tl.sum(tl.where(experts == expert, total, 0), axis=0)
        stop = (end + ALIGN - 1) // ALIGN * ALIGN
        tl.store(ends_E + expert, end)
        _fill(slots_R, end, stop, NOBODY, 128)
        _fill(owners_B, start // ALIGN, stop // ALIGN, expert, 128)
        if expert == E - 1:
            tl.store(used, stop)
            _fill(owners_B, stop // ALIGN, B, -1, 128)


_launch_count, _launch_place = TritonLauncher(_count), TritonLauncher(_place)


def expert_rows(experts_MT: Tensor, experts: int, align: int) -> ExpertRows:
    """Rows for the experts (integers, contiguous) that each token goes to, in two launches."""
    s, device = experts_MT.numel(), experts_MT.device
    r = capacity(s, experts, align)
    sizes = {"slots": r, "owners": r // align, "places": s, "ends": experts, "used": 1}
    rows = ExpertRows(**{n: torch.empty(size, dtype=torch.int32, device=device) for n, size in sizes.items()})
    size = SMALL if s <= SMALL else CHUNK
    chunks = max(1, -(-s // size))
    early = experts_MT.is_cuda
    grid, warps = (experts, chunks, 1), 8 if size == CHUNK else 4
    counts = torch.empty(chunks, experts, dtype=torch.int32, device=device)
    _launch_count(grid, (experts_MT, counts), (experts,), (s,), (early, size), warps)
    _launch_place(
        grid,
        (experts_MT, counts, *rows),
        (experts,),
        (s, r // align, chunks),
        (align, triton.next_power_of_2(experts), _COUNTED, NOBODY, early, size),
        warps,
    )
    return rows
