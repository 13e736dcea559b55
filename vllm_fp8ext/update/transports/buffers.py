# SPDX-License-Identifier: Apache-2.0
"""Tensors side by side in a few large allocations: another process opens a handle of each."""

from collections.abc import Sequence

import torch
from torch import Tensor

_UNIT = 256
"""Where a tensor begins: what torch's allocator gives, too."""
_LARGE = 8
"""No more than such a part of a buffer is left empty: a larger tensor that does not fit behind others is by itself."""


def padded(size: int) -> int:
    """Bytes that a tensor of `size` bytes takes in a buffer."""
    return -(-size // _UNIT) * _UNIT


class Buffers:
    """Allocations of `buffer_bytes`, one on each device being filled. Each lives as long as one of its tensors."""

    def __init__(self, buffer_bytes: int) -> None:
        self._buffer_bytes = buffer_bytes
        self._left: dict[torch.device, Tensor] = {}
        """What is left of those that are being filled."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialized tensor, contiguous, behind the last one if there is room."""
        size = torch.Size(shape).numel() * dtype.itemsize
        taken = padded(size)
        left = self._left.get(device)
        if left is None or left.numel() < taken:
            if taken > self._buffer_bytes // (1 if left is None else _LARGE):
                return torch.empty(torch.Size(shape), dtype=dtype, device=device)
            left = torch.empty(self._buffer_bytes, dtype=torch.uint8, device=device)
        self._left[device] = left[taken:]
        return left[:size].view(dtype).view(torch.Size(shape))
