# SPDX-License-Identifier: Apache-2.0
"""Exchanges the contents of many pairs of tensors in one launch: each byte is read once and written once."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_BYTES = 1 << 15
"""What one program exchanges."""
_UNIT = 16
"""Bytes of the widest load."""
_BYTE_TILE = 1 << 12
"""What one program exchanges byte by byte."""


@triton.jit
def _swap(table, WORDS: tl.constexpr):
    """One program, one row of `table`: two addresses, multiples of 16, and how many 16 bytes."""
    row = table + tl.program_id(0) * 3
    first = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.int32)), 16)
    second = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(tl.int32)), 16)
    words = tl.arange(0, WORDS)
    inside = words < tl.load(row + 2) * 4
    left = tl.load(first + words, mask=inside)
    right = tl.load(second + words, mask=inside)
    tl.store(first + words, right, mask=inside)
    tl.store(second + words, left, mask=inside)


@triton.jit
def _swap_bytes(table, BYTES: tl.constexpr):
    """The same at any address; the number counts bytes. For what is left at the end of a tensor, and for one that begins
    between two multiples of 16."""
    row = table + tl.program_id(0) * 3
    first = tl.load(row).to(tl.pointer_type(tl.uint8))
    second = tl.load(row + 1).to(tl.pointer_type(tl.uint8))
    offsets = tl.arange(0, BYTES)
    inside = offsets < tl.load(row + 2)
    left = tl.load(first + offsets, mask=inside)
    right = tl.load(second + offsets, mask=inside)
    tl.store(first + offsets, right, mask=inside)
    tl.store(second + offsets, left, mask=inside)


class Swap:
    """Pairs of contiguous tensors of equal sizes on one device, which stay where they are."""

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        tiles: list[tuple[int, int, int]] = []
        rest: list[tuple[int, int, int]] = []
        self._pairs = list(pairs)  # the addresses below are theirs
        for first, second in pairs:
            here, there, size = first.data_ptr(), second.data_ptr(), first.nbytes
            if second.nbytes != size:
                raise ValueError(f"swap: expected equal sizes, found {size} and {second.nbytes} bytes")
            whole = 0 if here % _UNIT or there % _UNIT else size // _UNIT * _UNIT
            tiles += [
                (here + at, there + at, min(TILE_BYTES, whole - at) // _UNIT)
                for at in range(0, whole, TILE_BYTES)
            ]
            rest += [
                (here + at, there + at, min(_BYTE_TILE, size - at)) for at in range(whole, size, _BYTE_TILE)
            ]
        device = pairs[0][0].device if pairs else torch.device("cpu")
        self._tiles, self._rest = (
            torch.tensor(rows, dtype=torch.int64).view(-1, 3).to(device) for rows in (tiles, rest)
        )

    def run(self) -> None:
        """Queue the exchange on the current stream."""
        if len(self._tiles):
            _swap[(len(self._tiles),)](self._tiles, WORDS=TILE_BYTES // 4, num_warps=8)
        if len(self._rest):
            _swap_bytes[(len(self._rest),)](self._rest, BYTES=_BYTE_TILE, num_warps=4)
