# SPDX-License-Identifier: Apache-2.0
"""Tensors side by side in a few large allocations: another process opens a handle of each."""

from collections.abc import Sequence

import torch
from torch import Tensor

_UNIT = 256
"""Where a tensor begins: what torch's allocator gives, too."""


class Buffers:
    """Allocations of `buffer_bytes`; a larger tensor has one of its own. Each lives as long as one of its tensors."""

    def __init__(self, buffer_bytes: int) -> None:
        self._buffer_bytes = buffer_bytes
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialized tensor, contiguous, behind the last one if there is room."""
        size = torch.Size(shape).numel() * dtype.itemsize
        room = -(-size // _UNIT) * _UNIT
        if self._used + room > self._buffer.numel() or self._buffer.device != device:
            self._buffer = torch.empty(max(self._buffer_bytes, room), dtype=torch.uint8, device=device)
            self._used = 0
        place = self._buffer[self._used : self._used + size]
        self._used += room
        return place.view(dtype).view(torch.Size(shape))
