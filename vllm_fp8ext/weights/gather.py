# SPDX-License-Identifier: Apache-2.0
"""Brings tensors that are read on the host to the rank's GPU, some at a time, so that they are staged there all at once.
Little is left to do for each part of a tensor, and little of Python's interpreter is taken from the engine beside it."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from vllm_fp8ext.weights.memory import Bucket, Placed
from vllm_fp8ext.weights.read_ahead import Rows
from vllm_fp8ext.weights.safetensors_header import StoredTensor

ROOM_BYTES = 256 << 20
"""On the GPU, for tensors that wait for others. A larger tensor goes by itself, in the parts in which it comes."""
_ALIGNED = 256
"""What places there are multiples of, in bytes."""


@dataclass(frozen=True, slots=True)
class Group:
    """Neighbours. If they fit, their starts are places in the room."""

    tensors: list[StoredTensor]
    fits: bool


def groups(tensors: Iterable[StoredTensor], room: int, apart: Collection[str]) -> Iterator[Group]:
    """The tensors, in their order; those of `apart` fit nowhere."""
    group: list[StoredTensor] = []
    size = 0
    for stored in tensors:
        fits = stored.size <= room and stored.spec.name not in apart
        if group and (not fits or size + stored.size > room):
            yield Group(group, fits=True)
            group, size = [], 0
        if not fits:
            yield Group([stored], fits=False)
            continue
        group.append(replace(stored, start=size))
        size += -(-stored.size // _ALIGNED) * _ALIGNED
    if group:
        yield Group(group, fits=True)


class Gather:
    """Keeps its room, made when it is needed first."""

    def __init__(self, device: torch.device, size: int = ROOM_BYTES) -> None:
        self._device = device
        self._size = size

    def gathered(
        self, rows: Iterable[Rows], tensors: Sequence[StoredTensor], apart: Collection[str]
    ) -> Iterator[Placed | Rows]:
        """The rows of these tensors, in their order, as groups of tensors on the GPU, each valid until the next is taken:
        what reads it must be queued on the current stream by then. Tensors of `apart`, by name, and larger ones come as
        they are."""
        coming = iter(rows)
        for group in groups(tensors, self._size, apart):
            if not group.fits:
                yield from _next(coming)
                continue
            for stored in group.tensors:
                self._bring(stored.start, _next(coming))
            yield Placed(group.tensors, Bucket(self._room))

    def _bring(self, start: int, rows: Iterator[Rows]) -> None:
        """Queue the copy of a tensor to its place."""
        for part in rows:
            raw = part.values.reshape(-1).view(torch.uint8)
            self._room[start : start + raw.numel()].copy_(raw, non_blocking=True)
            start += raw.numel()

    @cached_property
    def _room(self) -> Tensor:
        return torch.empty(self._size, dtype=torch.uint8, device=self._device)


def _next(rows: Iterator[Rows]) -> Iterator[Rows]:
    """Those of the next tensor."""
    for part in rows:
        yield part
        if part.last:
            return
