# SPDX-License-Identifier: Apache-2.0
"""Compares tensors bit for bit."""

import torch
from torch import Tensor

_COMPARED_BYTES = 16 << 20
"""Bytes that are compared at a time."""


def same_bytes(values: Tensor, there: Tensor) -> Tensor:
    """Return whether values, once converted, are these, bit for bit: a bool scalar on their device, some rows at a time."""
    step = max(1, _COMPARED_BYTES // max(1, there[:1].nbytes)) if there.dim() else 1
    parts = zip(values.split(step), there.split(step), strict=True) if there.dim() else [(values, there)]
    same = torch.ones((), dtype=torch.bool, device=there.device)
    for part, known in parts:
        converted = part.to(known.device, known.dtype).contiguous().view(-1).view(torch.uint8)
        same &= (converted == known.contiguous().view(-1).view(torch.uint8)).all()
    return same
