# SPDX-License-Identifier: Apache-2.0
"""Adds up the sums of each block of quantized weights, for many tensors at once."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 3
"""Squared quantization error, squared norm, and 1 where a value is NaN or infinite."""
_STEP = 256
"""Blocks that a program adds at a time."""


@triton.jit
def _totals(sums_TC, bounds, totals_PC, STEP: tl.constexpr, COLUMNS: tl.constexpr):
    """One program, one part: rows `bounds[p]` to `bounds[p + 1]`, always in the same order."""
    part = tl.program_id(0)
    start, stop = tl.load(bounds + part), tl.load(bounds + part + 1)
    for column in tl.static_range(COLUMNS):
        total = tl.zeros([STEP], tl.float64)
        for at in range(start, stop, STEP):
            rows = at + tl.arange(0, STEP)
            total += tl.load(sums_TC + rows * COLUMNS + column, mask=rows < stop, other=0.0).to(tl.float64)
        tl.store(totals_PC + part * COLUMNS + column, tl.sum(total, axis=0))


def added(sums_TC: Tensor, bounds: Tensor) -> Tensor:
    """fp64 `[P, C]`: the sum of each part, rows `bounds[p]` to `bounds[p + 1]` (int64 `[P + 1]`) of fp32 `[T, C]`."""
    totals = torch.empty(len(bounds) - 1, sums_TC.shape[1], dtype=torch.float64, device=sums_TC.device)
    _totals[(len(totals),)](sums_TC, bounds, totals, STEP=_STEP, COLUMNS=sums_TC.shape[1])
    return totals


def totals(parts: Sequence[Tensor]) -> Tensor:
    """Add up each of `P` tensors fp32 `[…, 3]` on one device: fp64 `[P, 3]`.

    Takes a few launches whatever their number.
    """
    flat = [part.reshape(-1, COLUMNS) for part in parts]
    bounds = torch.tensor([0, *(len(part) for part in flat)]).cumsum(0)
    return added(torch.cat(flat), bounds.to(flat[0].device))
