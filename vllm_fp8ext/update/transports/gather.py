# SPDX-License-Identifier: Apache-2.0
"""Copies groups of tensors from the host to the rank's GPU, to be staged together.

Little is left to do for each part of a tensor, and little of Python's interpreter is taken from the engine beside it.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from vllm_fp8ext.kernels.numerics.reference import UNIT
from vllm_fp8ext.update.contract.safetensors_header import StoredTensor
from vllm_fp8ext.update.transports.memory import BufferMemory, ResidentTensors
from vllm_fp8ext.update.transports.read_ahead import ByteRange, RawBytes, ReadItem, TensorRows

BUFFER_BYTES = 256 << 20
"""Buffer on the GPU for tensors that wait for others. A larger tensor goes by itself, as rows."""
_ALIGNED = 256
"""Bytes to a multiple of which ranges begin in the buffer; tensors begin at multiples of `UNIT`."""


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors that are copied together, whose starts count from the begin of the buffer; `ranges` of bytes hold them.

    Without ranges it is one tensor that comes as rows.
    """

    tensors: list[StoredTensor]
    ranges: list[ByteRange]


def group_tensors(
    tensors: Iterable[StoredTensor], capacity: int, as_rows: Collection[str]
) -> Iterator[TensorGroup]:
    """Yield the tensors as groups, in their order; those of `as_rows`, by name, and larger ones as rows."""
    group = TensorGroup([], [])
    size = 0
    for stored in tensors:
        whole = stored.size <= capacity and stored.spec.name not in as_rows
        last = group.ranges[-1] if group.ranges else None
        adjoins = last is not None and last.stop == stored.start and size % UNIT == 0
        at = size if adjoins else -(-size // _ALIGNED) * _ALIGNED
        if group.tensors and (not whole or at + stored.size > capacity):
            yield group
            group, last, adjoins, at, size = TensorGroup([], []), None, False, 0, 0
        if not whole:
            yield TensorGroup([stored], [])
            continue
        stop, size = stored.start + stored.size, at + stored.size
        group.tensors.append(stored._replace(start=at))
        if last is not None and adjoins:
            group.ranges[-1] = replace(last, stop=stop)
        else:
            group.ranges.append(ByteRange(stored.start, stop, at))
    if group.tensors:
        yield group


def read_items(schedule: Iterable[TensorGroup]) -> Iterator[ReadItem]:
    """Yield what has to be read for groups."""
    for group in schedule:
        yield from group.ranges or group.tensors


class Gather:
    """Copies groups of tensors into one buffer of the device; allocates it at the first group."""

    def __init__(self, device: torch.device, size: int = BUFFER_BYTES) -> None:
        self._device = device
        self._size = size

    def copy_schedule(self, tensors: Iterable[StoredTensor], as_rows: Collection[str]) -> list[TensorGroup]:
        """Return the groups in which these tensors, in their order, are copied; those of `as_rows`, by name, come as rows."""
        return list(group_tensors(tensors, self._size, as_rows))

    def copy_groups(
        self,
        parts: Iterable[TensorRows | RawBytes],
        schedule: Sequence[TensorGroup],
        require_wanted: Callable[[], None] = lambda: None,
    ) -> Iterator[ResidentTensors | TensorRows]:
        """Yield groups of tensors on the GPU, and rows as they come.

        `parts`: the `read_items` of the schedule. A group is valid until the next is taken: what reads it must be queued on
        the current stream by then. Given up when `require_wanted` raises.
        """
        coming = iter(parts)
        for group in schedule:
            if not group.ranges:
                yield from _next_tensor(coming)
                continue
            missing = sum(part.stop - part.start for part in group.ranges)
            while missing:
                require_wanted()
                missing -= self._copy(next(coming))
            yield ResidentTensors(group.tensors, BufferMemory(self._buffer))

    def _copy(self, part: TensorRows | RawBytes) -> int:
        """Queue the copy of some bytes into the buffer; return how many."""
        assert isinstance(part, RawBytes)
        size = len(part.values)
        self._buffer[part.destination : part.destination + size].copy_(part.values, non_blocking=True)
        return size

    @cached_property
    def _buffer(self) -> Tensor:
        return torch.empty(self._size, dtype=torch.uint8, device=self._device)


def _next_tensor(parts: Iterator[TensorRows | RawBytes]) -> Iterator[TensorRows]:
    """Yield the rows of the next tensor."""
    for part in parts:
        assert isinstance(part, TensorRows)
        yield part
        if part.last:
            return
