# SPDX-License-Identifier: Apache-2.0
"""What becomes of a tensor on the rank's GPU, or of a part of it, and one launch for all parts of a kind."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_fp8ext.kernels.memory import copy_batched as copy_together
from vllm_fp8ext.kernels.memory.copy_batched import CopyTogether
from vllm_fp8ext.kernels.memory.copy_blocks import CopyBlocks
from vllm_fp8ext.kernels.numerics.reference import BLOCK, FP8_DTYPE, UNIT, ScaleFormat, blocks
from vllm_fp8ext.kernels.quantize.quantize_weights_batched import Place, QuantizeTogether
from vllm_fp8ext.update.contract.manifest import Piece, TensorSpec
from vllm_fp8ext.update.worker.staging import Stager, place


@dataclass(frozen=True, slots=True)
class Errand:
    """One launch. Its parts come from tensors `sources`, numbered among all that came, and from `offsets` bytes behind their
    beginnings: int64 `[parts]`, or `[parts, 2]` for codes and scales. `owners`, int64 `[parts]`: tensors that are taken."""

    sources: Tensor
    owners: Tensor
    offsets: Tensor
    run: QuantizeTogether | CopyTogether | CopyBlocks


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a tensor of this dtype, and where it goes. What goes to a `Place` has codes and scales of this format there.
    `sources`, `offsets` and `owner` as in `Errand`."""

    dtype: torch.dtype
    offsets: tuple[int, ...]
    to: Place | Tensor
    scale_format: ScaleFormat | None = None
    scale_row: int = 0
    """Of scales that come: elements from one row to the next."""
    sources: tuple[int, ...] = ()
    owner: int = -1

    @property
    def kind(self) -> tuple[object, ...]:
        """What those have in common that go together."""
        return self.dtype, self.scale_format, isinstance(self.to, Place) and self.to.even


def part_of(stager: Stager, spec: TensorSpec, piece: Piece) -> Part | None:
    """What becomes of a piece of a tensor; None where it can't go with others."""
    shape, dtype = spec.shape, spec.torch_dtype
    starts = [start for start, _ in piece.source]
    offset = dtype.itemsize * sum(start * math.prod(shape[axis + 1 :]) for axis, start in enumerate(starts))
    target = stager.quantized.get(piece.target)
    if offset % UNIT:
        return None
    if target is None:
        room = place(stager.plain[piece.target], piece)
        if (
            dtype != room.dtype
            or not dtype.is_floating_point
            or shape[1:] != room.shape[1:]
            or not copy_together.takes(room)
        ):
            return None
        return Part(dtype, (offset,), room)
    first, last = piece.origin[0], piece.origin[0] + piece.source[0][1] - piece.source[0][0]
    rows, columns = target.codes.shape
    whole = first % BLOCK == 0 and (last % BLOCK == 0 or last == rows)
    if dtype not in (target.dtype, FP8_DTYPE) or not whole or piece.source[1][1] - starts[1] != columns:
        return None
    scales = target.scales[first // BLOCK : blocks(last)]
    to = Place(target.codes[first:last], scales, shape[1])
    if not to.takes(dtype):
        return None
    if dtype != FP8_DTYPE:
        return Part(dtype, (offset,), to, target.scale_format)
    row = blocks(shape[1])
    beside = (starts[0] // BLOCK * row + starts[1] // BLOCK) * torch.float32.itemsize
    return Part(dtype, (offset, beside), to, target.scale_format, row)


def errand(parts: list[Part]) -> Errand:
    """One launch for parts of one kind."""
    sources = torch.tensor([part.sources for part in parts], dtype=torch.int64)
    offsets = torch.tensor([part.offsets for part in parts], dtype=torch.int64)
    owners = torch.tensor([part.owner for part in parts], dtype=torch.int64)
    places = [part.to for part in parts if isinstance(part.to, Place)]
    dtype, scale_format = parts[0].dtype, parts[0].scale_format
    if dtype == FP8_DTYPE and scale_format is not None:
        copied = CopyBlocks(places, [part.scale_row for part in parts], scale_format)
        return Errand(sources, owners, offsets, copied)
    run: CopyTogether | QuantizeTogether
    if scale_format is None:
        run = CopyTogether([part.to for part in parts if isinstance(part.to, Tensor)])
    else:
        run = QuantizeTogether(places, dtype, scale_format)
    return Errand(sources[:, 0], owners, offsets[:, 0], run)
