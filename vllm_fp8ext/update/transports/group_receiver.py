# SPDX-License-Identifier: Apache-2.0
"""Receives the broadcasts of a group in one rank: one group at a time, one buffer for its bytes.

All ranks and the trainer broadcast the same bytes in the same order. A rank to which anything happens leaves the group for
good: what comes later through it would be taken for something else.
"""

import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract.safetensors_header import StoredTensor
from vllm_fp8ext.update.transports.memory import BufferMemory, ResidentTensors
from vllm_fp8ext.update.transports.native.message import NativeSource
from vllm_fp8ext.update.transports.nccl.group import GroupMember
from vllm_fp8ext.update.transports.nccl.message import BroadcastSource
from vllm_fp8ext.update.transports.read_ahead import TensorRows
from vllm_fp8ext.update.transports.receiver import RankDevice, Receiver

G = TypeVar("G", BroadcastSource, NativeSource)

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.02
"""Seconds between two looks: a tenth of the time that has passed, within these bounds."""


class GroupReceiver(Receiver[G]):
    """Receives broadcasts on the rank's thread for staging; on a GPU on that thread's stream."""

    _WAY_OUT: ClassVar[str]
    """Advice to a trainer whose group has failed."""

    def __init__(self, rank: RankDevice) -> None:
        super().__init__(rank)
        self._key: Hashable = None
        self._group: GroupMember | None = None
        self._buffer: Tensor | None = None

    @abstractmethod
    def _key_of(self, source: G) -> Hashable:
        """Return what tells a source's group from others."""

    @abstractmethod
    def _join(self, source: G) -> GroupMember:
        """Start to join a source's group."""

    @abstractmethod
    def _broadcast(self, source: G, group: GroupMember, wait: Callable[[str], None]) -> Tensor:
        """Receive a source's bytes; `wait` waits for the broadcast that was begun, or says that this did not come."""

    @contextmanager
    def open(
        self,
        source: G,
        tensors: Sequence[StoredTensor],
        as_rows: Collection[str],
        require_wanted: Callable[[], None],
    ) -> Iterator[Iterable[ResidentTensors | TensorRows]]:
        """Yield the tensors of a source's broadcasts (`Receiver.open`).

        Raises:
            UpdateError: as `receive`.
        """
        with self.receive(source, require_wanted) as memory:
            yield self._rank.resident(tensors, memory)

    @contextmanager
    def receive(self, source: G, require_wanted: Callable[[], None]) -> Iterator[BufferMemory]:
        """Receive a source's broadcasts, valid inside the context.

        `require_wanted` raises once nobody wants their tensors any more.

        Raises:
            UpdateError: `transfer-timeout`: the others, or the bytes, did not come within `source.seconds`.
                `transfer-failed`: anything else, also when the group had failed before.
        """
        data = self._receive_bytes(source, require_wanted)
        try:
            yield BufferMemory(data)
        finally:
            if data.is_cuda:  # the next broadcasts come to the same place
                torch.cuda.current_stream().synchronize()

    def _receive_bytes(self, source: G, require_wanted: Callable[[], None]) -> Tensor:
        try:
            require_wanted()
            group = self._joined(source, require_wanted)
            return self._broadcast(
                source,
                group,
                lambda failure: _wait(group.done, source.seconds, require_wanted, failure),
            )
        except BaseException:
            self._leave(self._key_of(source))
            raise

    def _joined(self, source: G, require_wanted: Callable[[], None]) -> GroupMember:
        key = self._key_of(source)
        if key != self._key:
            self._leave(key)
            self._group = group = self._join(source)
            failure = f"not all {source.size} processes of the group came"
            _wait(group.joined, source.seconds, require_wanted, failure)
        if self._group is None:
            raise UpdateError("transfer-failed", f"this group failed before: {self._WAY_OUT}")
        return self._group

    def _leave(self, key: Hashable) -> None:
        """Leave the group, as if it were the one of this key. Its buffer goes too: something may still write to it."""
        group, self._group, self._buffer, self._key = self._group, None, None, key
        if group is not None:
            group.close()

    def _buffer_of(self, size: int, device: torch.device) -> Tensor:
        if self._buffer is None or self._buffer.numel() < size:
            self._buffer = None  # before a larger one is made
            self._buffer = torch.empty(size, dtype=torch.uint8, device=device)
        return self._buffer[:size]


def _wait(done: Callable[[], bool], seconds: float, require_wanted: Callable[[], None], failure: str) -> None:
    start = time.monotonic()
    while not done():
        require_wanted()
        spent = time.monotonic() - start
        if spent > seconds:
            raise UpdateError("transfer-timeout", f"{failure} within {seconds:g} s", status=408)
        time.sleep(min(_SHORTEST_PAUSE + spent / 10, _LONGEST_PAUSE))
