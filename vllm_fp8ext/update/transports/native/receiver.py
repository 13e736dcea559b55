# SPDX-License-Identifier: Apache-2.0
"""The receiving side of vLLM's weight transfer, in one rank: one group at a time, one buffer for its broadcasts.

All ranks and the trainer broadcast the same bytes in the same order. A rank to which anything happens leaves the group for
good: what comes later through it would be taken for something else.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract.safetensors_header import StoredTensor
from vllm_fp8ext.update.transports.memory import BufferMemory, ResidentTensors
from vllm_fp8ext.update.transports.native.group import join
from vllm_fp8ext.update.transports.native.message import NativeSource
from vllm_fp8ext.update.transports.nccl.group import GroupMember
from vllm_fp8ext.update.transports.read_ahead import TensorRows
from vllm_fp8ext.update.transports.receiver import RankDevice, Receiver

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.02
"""Seconds between two looks: a tenth of the time that has passed, within these."""


class NativeReceiver(Receiver[NativeSource]):
    """Receives broadcasts on the rank's thread for staging; on a GPU on that thread's stream."""

    def __init__(self, rank: RankDevice) -> None:
        super().__init__(rank)
        self._number = 0
        self._group: GroupMember | None = None
        self._buffer: Tensor | None = None

    @contextmanager
    def open(
        self,
        source: NativeSource,
        tensors: Sequence[StoredTensor],
        as_rows: Collection[str],
        require_wanted: Callable[[], None],
    ) -> Iterator[Iterable[ResidentTensors | TensorRows]]:
        """Yield the tensors of some broadcasts (`Receiver.open`).

        Raises:
            UpdateError: as `receive`.
        """
        with self.receive(source, require_wanted) as memory:
            yield self._rank.resident(tensors, memory)

    @contextmanager
    def receive(self, source: NativeSource, require_wanted: Callable[[], None]) -> Iterator[BufferMemory]:
        """Receive some broadcasts, valid inside the context.

        `require_wanted` raises once nobody wants their tensors any more.

        Raises:
            UpdateError: `transfer-timeout`: the others, or the bytes, did not come within `source.seconds`.
                `transfer-failed`: anything else, also when the group had failed before.
        """
        data = self._received(source, require_wanted)
        try:
            yield BufferMemory(data)
        finally:
            if data.is_cuda:  # the next broadcasts come to the same place
                torch.cuda.current_stream().synchronize()

    def _received(self, source: NativeSource, require_wanted: Callable[[], None]) -> Tensor:
        if not source.native:
            self._leave(0)
            return torch.empty(0, dtype=torch.uint8, device=self._rank.device)
        try:
            require_wanted()
            group = self._joined(source, require_wanted)
            data, start = self._room(source.bytes, group.device), 0
            for number, size in enumerate(source.parts):
                group.begin(data[start : start + size])
                absent = f"broadcast {number + 1} of {len(source.parts)}, of {size} bytes, did not come"
                _wait(group.done, source.seconds, require_wanted, absent)
                start += size
            for place, to, size in source.moves:
                data[to : to + size].copy_(data[place : place + size])
            return data
        except BaseException:
            self._leave(source.native)
            raise

    def _joined(self, source: NativeSource, require_wanted: Callable[[], None]) -> GroupMember:
        if source.native != self._number:
            self._leave(source.native)
            self._group = join(source, source.first_rank + self._rank.rank, self._rank.device)
            absent = f"not all {source.size} processes of the group came"
            _wait(self._group.joined, source.seconds, require_wanted, absent)
        if self._group is None:
            message = "this group failed before: call init_weight_transfer_engine again"
            raise UpdateError("transfer-failed", message)
        return self._group

    def _leave(self, number: int) -> None:
        """Leave the group, as if it were the one of this number. Its buffer goes too: something may still write to it."""
        group, self._group, self._buffer, self._number = self._group, None, None, number
        if group is not None:
            group.close()

    def _room(self, size: int, device: torch.device) -> Tensor:
        if self._buffer is None or self._buffer.numel() < size:
            self._buffer = None  # before a larger one is made
            self._buffer = torch.empty(size, dtype=torch.uint8, device=device)
        return self._buffer[:size]


def _wait(done: Callable[[], bool], seconds: float, require_wanted: Callable[[], None], absent: str) -> None:
    begun = time.monotonic()
    while not done():
        require_wanted()
        spent = time.monotonic() - begun
        if spent > seconds:
            raise UpdateError("transfer-timeout", f"{absent} within {seconds:g} s", status=408)
        time.sleep(min(_SHORTEST_PAUSE + spent / 10, _LONGEST_PAUSE))
