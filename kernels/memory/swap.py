# SPDX-License-Identifier: Apache-2.0
"""Exchanges the contents of many pairs of tensors in one launch: each byte is read once and written once. And tells what one
side holds from anything else, in one read."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_BYTES = 1 << 14
"""Bytes that one program exchanges: with 8 warps 87 % of an H200's copy bandwidth, twice as much 56 %."""
_UNIT = 16
"""Bytes of the widest load."""
_BYTE_TILE = 1 << 12
"""Bytes that one program exchanges byte by byte."""


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


@triton.jit
def _weights(positions, SALT: tl.constexpr):
    """An odd number for each position, in 32 bits: the finalizer of MurmurHash3 (Appleby, 2011) of a multiple of it."""
    x = (positions.to(tl.uint32) ^ SALT) * 0x9E3779B1
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return ((x ^ (x >> 16)) | 1).to(tl.int64)


@triton.jit
def _fingerprint(
    table, sums, SIDE: tl.constexpr, COUNT: tl.constexpr, BYTES: tl.constexpr, SALT: tl.constexpr
):
    """One program, one row of `table`: its words (or bytes), each times its position's weight, added up in 64 bits."""
    program = tl.program_id(0)
    row = table + program * 3
    offsets = tl.arange(0, COUNT)
    if BYTES:
        here = tl.load(row + SIDE).to(tl.pointer_type(tl.uint8))
        values = tl.load(here + offsets, mask=offsets < tl.load(row + 2), other=0)
    else:
        here = tl.multiple_of(tl.load(row + SIDE).to(tl.pointer_type(tl.uint32)), 16)
        values = tl.load(here + offsets, mask=offsets < tl.load(row + 2) * 4, other=0)
    weights = _weights(program.to(tl.int64) * COUNT + offsets, SALT)
    tl.store(sums + program, tl.sum(values.to(tl.int64) * weights, axis=0))


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
        # made once: a fingerprint is taken of what is served, when a trainer may have left no memory
        self._sums = [
            [torch.empty(len(rows), dtype=torch.int64, device=device) for rows in (tiles, rest)]
            for _ in range(2)
        ]

    def run(self) -> None:
        """Queue the exchange on the current stream."""
        if len(self._tiles):
            _swap[(len(self._tiles),)](self._tiles, WORDS=TILE_BYTES // 4, num_warps=8)
        if len(self._rest):
            _swap_bytes[(len(self._rest),)](self._rest, BYTES=_BYTE_TILE, num_warps=4)

    def fingerprint(self, side: int) -> int:
        """64 bits of the contents of the first (0) or the second (1) tensors; waits for the current stream. Not to be called
        twice for one side at the same time.

        A sum of words times weights of their positions, modulo 2^64: a changed word always shows, other changes with near
        certainty. It finds accidents, not forgeries.
        """
        parts = []
        of_tiles, of_rest = self._sums[side]
        for rows, sums, count, as_bytes, salt in (
            (self._tiles, of_tiles, TILE_BYTES // 4, False, 0),
            (self._rest, of_rest, _BYTE_TILE, True, 0x5BD1E995),
        ):
            if len(rows):
                _fingerprint[(len(rows),)](
                    rows, sums, SIDE=side, COUNT=count, BYTES=as_bytes, SALT=salt, num_warps=8
                )
            parts.append(sums.sum())
        return int(sum(parts[1:], parts[0])) % 2**64
