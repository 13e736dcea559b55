# SPDX-License-Identifier: Apache-2.0
"""Brings tensors that are read on the host to the rank's GPU, some at a time, so that they are staged there all at once.
Little is left to do for each part of a tensor, and little of Python's interpreter is taken from the engine beside it."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from vllm_fp8ext.kernels.numerics.reference import UNIT
from vllm_fp8ext.update.contract.safetensors_header import StoredTensor
from vllm_fp8ext.update.transports.memory import Bucket, Placed
from vllm_fp8ext.update.transports.read_ahead import Raw, Rows, Stretch, Wanted

ROOM_BYTES = 256 << 20
"""On the GPU, for tensors that wait for others. A larger tensor goes by itself, as rows."""
_ALIGNED = 256
"""What the places of stretches are multiples of, in bytes; those of tensors are of `UNIT`."""


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors that are brought together: their starts are places in the room, where the `stretches` go that hold them. Or,
    without stretches, one tensor that comes as rows."""

    tensors: list[StoredTensor]
    stretches: list[Stretch]


def groups(tensors: Iterable[StoredTensor], room: int, apart: Collection[str]) -> Iterator[Group]:
    """The tensors, in their order; those of `apart`, by name, and larger ones as rows."""
    group = Group([], [])
    size = 0
    for stored in tensors:
        whole = stored.size <= room and stored.spec.name not in apart
        last = group.stretches[-1] if group.stretches else None
        adjoins = last is not None and last.stop == stored.start and size % UNIT == 0
        at = size if adjoins else -(-size // _ALIGNED) * _ALIGNED
        if group.tensors and (not whole or at + stored.size > room):
            yield group
            group, last, adjoins, at, size = Group([], []), None, False, 0, 0
        if not whole:
            yield Group([stored], [])
            continue
        stop, size = stored.start + stored.size, at + stored.size
        group.tensors.append(stored._replace(start=at))
        if last is not None and adjoins:
            group.stretches[-1] = replace(last, stop=stop)
        else:
            group.stretches.append(Stretch(stored.start, stop, at))
    if group.tensors:
        yield group


def reads(plan: Iterable[Group]) -> Iterator[Wanted]:
    """What is to be read of groups."""
    for group in plan:
        yield from group.stretches or group.tensors


class Gather:
    """Keeps its room, made when it is needed first."""

    def __init__(self, device: torch.device, size: int = ROOM_BYTES) -> None:
        self._device = device
        self._size = size

    def plan(self, tensors: Iterable[StoredTensor], apart: Collection[str]) -> list[Group]:
        """How these tensors, in their order, are brought. Those of `apart`, by name, come as rows."""
        return list(groups(tensors, self._size, apart))

    def gathered(
        self, parts: Iterable[Rows | Raw], plan: Sequence[Group], wanted: Callable[[], None] = lambda: None
    ) -> Iterator[Placed | Rows]:
        """What a plan `reads`, as it was planned: groups of tensors on the GPU, each valid until the next is taken (what
        reads it must be queued on the current stream by then), and rows as they come. Given up when `wanted` raises."""
        coming = iter(parts)
        for group in plan:
            if not group.stretches:
                yield from _rows(coming)
                continue
            missing = sum(stretch.stop - stretch.start for stretch in group.stretches)
            while missing:
                wanted()
                missing -= self._bring(next(coming))
            yield Placed(group.tensors, Bucket(self._room))

    def _bring(self, part: Rows | Raw) -> int:
        """Queue the copy of some bytes to their place; how many."""
        assert isinstance(part, Raw)
        size = len(part.values)
        self._room[part.at : part.at + size].copy_(part.values, non_blocking=True)
        return size

    @cached_property
    def _room(self) -> Tensor:
        return torch.empty(self._size, dtype=torch.uint8, device=self._device)


def _rows(parts: Iterator[Rows | Raw]) -> Iterator[Rows]:
    """Those of the next tensor."""
    for part in parts:
        assert isinstance(part, Rows)
        yield part
        if part.last:
            return
