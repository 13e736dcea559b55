# SPDX-License-Identifier: Apache-2.0
"""Adds up what the quantization of weights says of each block, for many tensors at once."""

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
def _totals(sums_T3, bounds, totals_P3, STEP: tl.constexpr, COLUMNS: tl.constexpr):
    """One program, one part: rows `bounds[p]` to `bounds[p + 1]`, always in the same order."""
    part = tl.program_id(0)
    start, stop = tl.load(bounds + part), tl.load(bounds + part + 1)
    for column in tl.static_range(COLUMNS):
        total = tl.zeros([STEP], tl.float64)
        for at in range(start, stop, STEP):
            rows = at + tl.arange(0, STEP)
            total += tl.load(sums_T3 + rows * COLUMNS + column, mask=rows < stop, other=0.0).to(tl.float64)
        tl.store(totals_P3 + part * COLUMNS + column, tl.sum(total, axis=0))


def totals(parts: Sequence[Tensor]) -> Tensor:
    """fp64 `[P, 3]` of `P` tensors fp32 `[…, 3]` on one device, in a few launches whatever their number."""
    flat = [part.reshape(-1, COLUMNS) for part in parts]
    device = flat[0].device
    found = torch.empty(len(flat), COLUMNS, dtype=torch.float64, device=device)
    bounds = torch.tensor([0, *(len(part) for part in flat)]).cumsum(0).to(device)
    _totals[(len(flat),)](torch.cat(flat), bounds, found, STEP=_STEP, COLUMNS=COLUMNS)
    return found
