# SPDX-License-Identifier: Apache-2.0
"""Parts of checkpoint tensors that ranks serve, and the blocks that they fill there."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_fp8ext.kernels.numerics.layout import BLOCK
from vllm_fp8ext.update.contract.tensor_slices import Box, covers, intersection, volume


@dataclass(frozen=True, slots=True)
class ShardSlice:
    """Part of one checkpoint tensor that one rank serves, and its place there.

    `source`: start and stop in each dimension of the checkpoint tensor. `origin`: its first element in the parameter
    `target` of shape `target_shape`, which may have fewer dimensions, or more: the first ones of the other are of one element
    then, such as one expert of many. `quantized`: served as codes with one scale per 128x128 block of the parameter, whose
    blocks start at the parameter's origin; otherwise as values of `dtype`. `transposed`: the tensor's last two dimensions are
    the parameter's in the other order.
    """

    rank: int
    target: str
    target_shape: tuple[int, ...]
    source: tuple[tuple[int, int], ...]
    origin: tuple[int, ...]
    quantized: bool
    dtype: str
    transposed: bool = False

    @property
    def extents(self) -> tuple[int, ...]:
        """Elements in each dimension of the parameter."""
        sizes = [stop - start for start, stop in self.source]
        if self.transposed:
            sizes[-2:] = reversed(sizes[-2:])
        lacking = len(self.origin) - len(sizes)
        return (1,) * lacking + tuple(sizes[max(-lacking, 0) :])


def piece_within(piece: ShardSlice, box: Box) -> ShardSlice | None:
    """Return the part of a piece that lies in a slice of its tensor. Its `source` counts from the begin of the slice."""
    shared = intersection(piece.source, box)
    if shared is None:
        return None
    shifts = [start - first for (start, _), (first, _) in zip(shared, piece.source, strict=True)]
    if piece.transposed:
        shifts[-2:] = reversed(shifts[-2:])
    lacking = len(piece.origin) - len(shifts)
    shifts = [0] * lacking + shifts[max(-lacking, 0) :]
    origin = tuple(begin + shift for begin, shift in zip(piece.origin, shifts, strict=True))
    source = tuple(
        (start - first, stop - first) for (start, stop), (first, _) in zip(shared, box, strict=True)
    )
    return replace(piece, source=source, origin=origin)


def missing_rows(piece: ShardSlice, rows: Sequence[tuple[int, int]]) -> Iterator[Box]:
    """Yield boxes of a piece's tensor that complete the block rows of these rows."""
    room = piece.target_shape[0]
    mine = (piece.origin[0], piece.origin[0] + piece.extents[0])
    axis = len(piece.source) - (1 if piece.transposed else 2)
    for index in sorted({at // BLOCK for start, stop in rows for at in (start, stop - 1)}):
        block = (index * BLOCK, min((index + 1) * BLOCK, room))
        came = [shared for each in rows if (shared := intersection((each,), (block,)))]
        if sum(map(volume, came)) == block[1] - block[0]:
            continue
        wanted = intersection((mine,), (block,))
        if wanted is None or covers([(each,) for each in rows], wanted):
            continue
        shift = piece.source[axis][0] - piece.origin[0]
        side = (wanted[0][0] + shift, wanted[0][1] + shift)
        yield (*piece.source[:axis], side, *piece.source[axis + 1 :])


def in_whole_blocks(part: ShardSlice) -> bool:
    """Tell whether a part of a piece fills whole blocks of its parameter, a matrix."""
    return len(part.origin) == 2 and all(
        origin % BLOCK == 0 and ((origin + size) % BLOCK == 0 or origin + size == room)
        for origin, size, room in zip(part.origin, part.extents, part.target_shape, strict=True)
    )


def is_whole_blocks(box: Box, shape: tuple[int, ...]) -> bool:
    """Tell whether a slice consists of whole blocks of its tensor."""
    return len(box) == len(shape) and all(
        start % BLOCK == 0 and (stop % BLOCK == 0 or stop == size)
        for (start, stop), size in zip(box, shape, strict=True)
    )


def is_aligned(piece: ShardSlice, shape: tuple[int, ...]) -> bool:
    """Tell whether a piece of a matrix has whole blocks of it and its parameter.

    `shape`: of the tensor, which may be no matrix.
    """
    return (
        piece.quantized
        and not piece.transposed
        and len(shape) == 2
        and is_whole_blocks(piece.source, shape)
        and in_whole_blocks(piece)
    )


def shard_slice_of(data: Mapping[str, Any]) -> ShardSlice:
    """Return the piece that JSON describes."""
    return ShardSlice(
        rank=data["rank"],
        target=data["target"],
        target_shape=tuple(data["target_shape"]),
        source=tuple((start, stop) for start, stop in data["source"]),
        origin=tuple(data["origin"]),
        quantized=data["quantized"],
        dtype=data["dtype"],
        transposed=data.get("transposed", False),
    )
