# SPDX-License-Identifier: Apache-2.0
"""Tensors side by side in a few large allocations: another process opens a handle of each."""

from collections.abc import Sequence

import torch
from torch import Tensor

_UNIT = 256
"""Bytes to a multiple of which tensors begin, as those of torch's allocator."""
_LARGE = 8
"""Part of a buffer, as a divisor, that may be left empty: a larger tensor that does not fit behind others is by itself."""


def padded(size: int) -> int:
    """Return the bytes that a tensor of `size` bytes takes in a buffer."""
    return -(-size // _UNIT) * _UNIT


class Buffers:
    """Fills allocations of `buffer_bytes`, one on each device at a time. Each lives as long as one of its tensors."""

    def __init__(self, buffer_bytes: int) -> None:
        self._buffer_bytes = buffer_bytes
        self._left: dict[torch.device, Tensor] = {}
        """Unused rest of the allocation that is being filled, by device."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialized tensor, contiguous, behind the last one if there is room."""
        size = torch.Size(shape).numel() * dtype.itemsize
        taken = padded(size)
        left = self._left.get(device)
        if left is None or left.numel() < taken:
            if taken > self._buffer_bytes // (1 if left is None else _LARGE):
                return torch.empty(torch.Size(shape), dtype=dtype, device=device)
            left = torch.empty(self._buffer_bytes, dtype=torch.uint8, device=device)
        self._left[device] = left[taken:]
        return left[:size].view(dtype).view(torch.Size(shape))
