# SPDX-License-Identifier: Apache-2.0
"""Steps of many tensors in one launch, by the addresses of the tensors alone."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm_fp8ext.kernels.memory import copy_batched
from vllm_fp8ext.kernels.memory.copy_batched import CopyBatched
from vllm_fp8ext.kernels.memory.copy_blocks import CopyBlocks
from vllm_fp8ext.kernels.numerics.reference import BLOCK, UNIT, blocks
from vllm_fp8ext.kernels.quantize.quantize_weights_batched import Destination, QuantizeBatched
from vllm_fp8ext.update.contract.manifest import TensorSpec
from vllm_fp8ext.update.worker.staging_steps import CopyCodes, CopyValues, FillStrip, QuantizeBlocks, Step
from vllm_fp8ext.update.worker.verdicts import COPIED_CODES, COPIED_VALUES, QUANTIZED, Columns


@dataclass(frozen=True, slots=True)
class BatchedOp:
    """One launch for `parts` of tensors, again and again.

    `columns`: what the launch measures. `sources`: the tensors that parts come from, numbered among all that come, int64
    `[parts]`; or `[parts, 2]` of codes and of scales. `offsets`: bytes behind their beginnings, likewise. `owners`: whose
    they are, numbered among those that are staged, int64 `[parts]`.
    """

    columns: Columns
    sources: Tensor
    offsets: Tensor
    owners: Tensor
    kernel: QuantizeBatched | CopyBatched | CopyBlocks

    def queue(self, addresses: Tensor, wait: Callable[[int], None] | None) -> tuple[Columns, Tensor, Tensor]:
        """Queue the launch for tensors at these addresses, int64 on the host; returns what `VerdictTable.add_batch` takes.
        `wait`: called with the bytes of each launch, which are then smaller ones."""
        sums = self.kernel.queue(addresses[self.sources] + self.offsets, wait)
        return self.columns, self.owners, sums.view(len(self.owners), -1)


@dataclass(frozen=True, slots=True)
class BatchItem:
    """A step of a tensor that can be launched with others: with those of the same `dtype`, and of `even` blocks or not.

    `sources`, `offsets` and `owner` as of `BatchedOp`. `scale_row`: of scales that come, elements from one row to the next.
    """

    step: QuantizeBlocks | CopyCodes | CopyValues
    dtype: torch.dtype
    destination: Destination | Tensor
    offsets: tuple[int, ...]
    scale_row: int = 0
    sources: tuple[int, ...] = ()
    owner: int = -1

    @property
    def kind(self) -> tuple[object, ...]:
        """Key that the items of one launch share."""
        scale_format = None if isinstance(self.step, CopyValues) else self.step.target.scale_format
        even = isinstance(self.destination, Destination) and self.destination.even
        return type(self.step), self.dtype, scale_format, even


def batch_item(spec: TensorSpec, step: Step) -> BatchItem | None:
    """Return a step of a tensor as an item of a batch; None where it has to run by itself.

    That is a step that fills a strip or some columns, converts or transposes values, or lies where no kernel reads or
    writes 16 bytes at a time.
    """
    if isinstance(step, FillStrip) or (not isinstance(step, CopyCodes) and step.transposed):
        return None
    if not isinstance(step, CopyValues) and not step.all_columns:
        return None
    shape, dtype = spec.shape, spec.torch_dtype
    starts = [start for start, _ in step.source]
    offset = dtype.itemsize * sum(start * math.prod(shape[axis + 1 :]) for axis, start in enumerate(starts))
    if offset % UNIT:
        return None
    if isinstance(step, CopyValues):
        room = step.destination
        as_it_is = dtype == room.dtype and dtype.is_floating_point and shape[1:] == room.shape[1:]
        return BatchItem(step, dtype, room, (offset,)) if as_it_is and copy_batched.takes(room) else None
    top, bottom = step.source[-2]
    stop = step.start + bottom - top
    target = step.target
    place = Destination(target.codes[step.start : stop], target.scales_of(step.start, stop), shape[-1])
    if not place.takes(dtype):
        return None
    if isinstance(step, QuantizeBlocks):
        return BatchItem(step, dtype, place, (offset,)) if dtype == target.dtype else None
    row = blocks(shape[1])
    scales_offset = (starts[0] // BLOCK * row + starts[1] // BLOCK) * torch.float32.itemsize
    return BatchItem(step, dtype, place, (offset, scales_offset), row)


def batched_ops(items: Iterable[BatchItem]) -> list[BatchedOp]:
    """Return the launches for these items: one for each kind."""
    alike: dict[tuple[object, ...], list[BatchItem]] = defaultdict(list)
    for item in items:
        alike[item.kind].append(item)
    return [_batched_op(items) for items in alike.values()]


def _batched_op(items: Sequence[BatchItem]) -> BatchedOp:
    sources = torch.tensor([item.sources for item in items], dtype=torch.int64)
    offsets = torch.tensor([item.offsets for item in items], dtype=torch.int64)
    owners = torch.tensor([item.owner for item in items], dtype=torch.int64)
    places = [item.destination for item in items if isinstance(item.destination, Destination)]
    step = items[0].step
    if isinstance(step, CopyCodes):
        scale_rows = [item.scale_row for item in items]
        kernel = CopyBlocks(places, scale_rows, step.target.scale_format)
        return BatchedOp(COPIED_CODES, sources, offsets, owners, kernel)
    if isinstance(step, QuantizeBlocks):
        quantize = QuantizeBatched(places, items[0].dtype, step.target.scale_format)
        return BatchedOp(QUANTIZED, sources[:, 0], offsets[:, 0], owners, quantize)
    copy = CopyBatched([item.destination for item in items if isinstance(item.destination, Tensor)])
    return BatchedOp(COPIED_VALUES, sources[:, 0], offsets[:, 0], owners, copy)


def renumbered(op: BatchedOp, numbers: Tensor) -> BatchedOp:
    """Return a launch whose tensors come in another order: `numbers[n]` is where tensor `n` comes now."""
    return replace(op, sources=numbers[op.sources])
