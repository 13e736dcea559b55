# SPDX-License-Identifier: Apache-2.0
"""The steps by which a checkpoint tensor gets into one rank's parameters: quantize block rows, fill a strip, copy codes, copy
values.

`steps_of` is the only place that decides them. Each step can run by itself, on rows of its tensor; `batched_ops` runs steps
of one kind, of many tensors, in one launch. Both write the same bytes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from vllm_fp8ext.kernels.numerics.reference import BLOCK, FP8_DTYPE
from vllm_fp8ext.update.contract.shard_slice import ShardSlice
from vllm_fp8ext.update.worker.quantized_target import QuantizedTarget
from vllm_fp8ext.update.worker.same_bytes import same_bytes
from vllm_fp8ext.update.worker.verdicts import COMPARED, COPIED_CODES, VerdictTable

Box: TypeAlias = tuple[tuple[int, int], ...]
"""Start and stop in each dimension of a checkpoint tensor; none of a scalar's."""


@dataclass(frozen=True, slots=True)
class StagingInput:
    """Rows of a checkpoint tensor from `first` on, `[rows, …]`; a scalar's are itself.

    `scales`: of a tensor that comes as codes, fp32 `[ceil(N/128), ceil(K/128)]`, for all of its rows.
    """

    name: str
    values: Tensor
    first: int = 0
    scales: Tensor | None = None

    @property
    def count(self) -> int:
        """How many rows these are."""
        return self.values.shape[0] if self.values.dim() else 1

    def within(self, box: Box) -> Tensor:
        """Return the values in a box, which has no other rows than these."""
        if not box or tuple(stop - start for start, stop in box) == self.values.shape:
            return self.values
        (top, bottom), *others = box
        rows = slice(top - self.first, bottom - self.first)
        return self.values[(rows, *(slice(*extent) for extent in others))]

    def matrix_in(self, box: Box, *, transposed: bool) -> Tensor:
        """Return a box of one matrix as `[rows, columns]` of a parameter.

        The elements of a row lie together.
        """
        values = self.within(box)
        values = values.reshape(values.shape[-2:])
        values = values.t() if transposed else values
        return values if values.stride(-1) == 1 else values.contiguous()


@dataclass(frozen=True, slots=True)
class QuantizeBlocks:
    """Quantize whole blocks into `target`, from its row `start` and its column `left` on.

    `transposed`: rows are columns of the tensor.
    """

    source: Box
    target: QuantizedTarget
    start: int
    transposed: bool = False
    left: int = 0

    @property
    def all_columns(self) -> bool:
        """True unless it has a part of the parameter's columns."""
        first, last = self.source[-2 if self.transposed else -1]
        return last - first == self.target.codes.shape[1]

    def run(self, rows: StagingInput, table: VerdictTable) -> None:
        """Queue the step."""
        values = rows.matrix_in(self.source, transposed=self.transposed).to(self.target.dtype)
        table.add_blocks(rows.name, self.target.quantize(self.start, values, self.left))


@dataclass(frozen=True, slots=True)
class FillStrip:
    """Fill a part of one block row of `target`, from its row `start` on. `tensor_rows`: as of `QuantizedTarget.fill`;
    `transposed`: as of `QuantizeBlocks`."""

    source: Box
    target: QuantizedTarget
    start: int
    tensor_rows: tuple[int, int]
    transposed: bool = False

    def run(self, rows: StagingInput, table: VerdictTable) -> None:
        """Queue the step, and the quantization of the block row when it is complete."""
        values = rows.matrix_in(self.source, transposed=self.transposed).to(self.target.dtype)
        waiting, sums = self.target.fill(self.start, values, self.tensor_rows)
        table.add_values(rows.name, waiting)
        if sums is not None:
            table.add_blocks(rows.name, sums)


@dataclass(frozen=True, slots=True)
class CopyCodes:
    """Copy quantized blocks and their scales into `target`, from row `start` and column `left` on."""

    source: Box
    target: QuantizedTarget
    start: int
    left: int = 0

    @property
    def all_columns(self) -> bool:
        """True unless it has a part of the parameter's columns."""
        first, last = self.source[-1]
        return last - first == self.target.codes.shape[1]

    @property
    def scales_source(self) -> tuple[slice, slice]:
        """Rows and columns of the tensor's scales that go with the codes."""
        (top, bottom), (left, right) = self.source
        return slice(top // BLOCK, -(-bottom // BLOCK)), slice(left // BLOCK, -(-right // BLOCK))

    def run(self, rows: StagingInput, table: VerdictTable) -> None:
        """Queue the step."""
        assert rows.scales is not None
        values = rows.within(self.source)
        codes, scales = self.target.part(self.start, self.left, values.shape)
        codes.copy_(values, non_blocking=True)
        scales.copy_(rows.scales[self.scales_source], non_blocking=True)
        finite = ((codes.view(torch.uint8) & 0x7F) != 0x7F).all() & torch.isfinite(scales).all()
        good = (scales > 0).all()
        if self.target.scale_format == "pow2":
            good &= (torch.frexp(scales).mantissa == 0.5).all()
        table.add_flags(rows.name, COPIED_CODES, ~torch.stack([finite, good | ~finite]))


@dataclass(frozen=True, slots=True)
class CopyValues:
    """Copy values into `destination`, a part of a parameter or buffer, in its dtype. `transposed`: the last two dimensions
    are the tensor's in the other order."""

    source: Box
    destination: Tensor
    transposed: bool = False

    def _values(self, rows: StagingInput) -> Tensor:
        values = rows.within(self.source)
        return (values.transpose(-1, -2) if self.transposed else values).reshape(self.destination.shape)

    def run(self, rows: StagingInput, table: VerdictTable) -> None:
        """Queue the step."""
        self.destination.copy_(self._values(rows), non_blocking=True)
        if self.destination.is_floating_point():
            table.add_values(rows.name, self.destination)

    def compare(self, rows: StagingInput, table: VerdictTable) -> None:
        """Queue the comparison with the destination's bytes, instead of the copy."""
        differs = ~same_bytes(self._values(rows), self.destination)
        table.add_flags(rows.name, COMPARED, differs[None])


Step: TypeAlias = QuantizeBlocks | FillStrip | CopyCodes | CopyValues


def steps_of(
    piece: ShardSlice,
    quantized: Mapping[str, QuantizedTarget],
    plain: Mapping[str, Tensor],
    rows: tuple[int, int],
    dtype: torch.dtype,
) -> Iterator[Step]:
    """Yield the steps for a piece of a tensor that comes in this dtype: those for its rows from `rows[0]` to `rows[1]`."""
    part = _clipped(piece, *rows)
    if part is None:
        return
    target = quantized.get(part.target)
    if target is None:
        yield CopyValues(part.source, destination_of(plain[part.target], part), part.transposed)
    elif dtype == FP8_DTYPE:
        yield CopyCodes(part.source, target, *part.origin)
    else:
        yield from _quantizing(part, target, _rows_of(piece))


def _quantizing(part: ShardSlice, target: QuantizedTarget, tensor_rows: tuple[int, int]) -> Iterator[Step]:
    """Whole block rows at once; the rows before and after them in strips."""
    start, stop = _rows_of(part)
    begin = -(-start // BLOCK) * BLOCK
    end = stop if stop == target.codes.shape[0] else stop // BLOCK * BLOCK
    axis = len(part.source) - (1 if part.transposed else 2)
    shift = part.source[axis][0] - start

    def source(first: int, last: int) -> Box:
        return (*part.source[:axis], (first + shift, last + shift), *part.source[axis + 1 :])

    if begin < end:
        yield QuantizeBlocks(source(begin, end), target, begin, part.transposed, part.origin[1])
    for first, last in ((start, min(begin, stop)), (max(end, begin, start), stop)):
        if first < last:
            yield FillStrip(source(first, last), target, first, tensor_rows, part.transposed)


def _rows_of(piece: ShardSlice) -> tuple[int, int]:
    """Start and stop of the rows that a piece fills in its parameter."""
    return piece.origin[0], piece.origin[0] + piece.extents[0]


def _clipped(piece: ShardSlice, first: int, last: int) -> ShardSlice | None:
    """The part of a piece that lies in rows `first` to `last` of its tensor: of one matrix of many, all or nothing."""
    if not piece.source:
        return piece
    (start, stop), *others = piece.source
    top, bottom = max(start, first), min(stop, last)
    if top >= bottom:
        return None
    if (top, bottom) == (start, stop):
        return piece
    axis = len(piece.origin) - len(piece.source)  # which dimension of the parameter the rows are
    origin = [*piece.origin]
    origin[axis] += top - start
    return replace(piece, source=((top, bottom), *others), origin=tuple(origin))


def destination_of(parameter: Tensor, piece: ShardSlice) -> Tensor:
    """Return the part of a parameter that a piece fills."""
    extents = zip(piece.origin, piece.extents, strict=True)
    return parameter[tuple(slice(origin, origin + size) for origin, size in extents)]
