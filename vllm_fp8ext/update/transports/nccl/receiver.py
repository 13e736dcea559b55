# SPDX-License-Identifier: Apache-2.0
"""Receives a trainer's broadcasts in one rank: one group at a time, one buffer for its buckets.

All ranks and the trainer must broadcast the same buckets in the same order. So a rank to which anything happens leaves the
group, for good: what comes later through it would be taken for something else.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract.safetensors_header import StoredTensor
from vllm_fp8ext.update.transports.memory import BufferMemory, ResidentTensors
from vllm_fp8ext.update.transports.nccl.group import GroupMember, join
from vllm_fp8ext.update.transports.nccl.message import MARK_BYTES, BroadcastSource
from vllm_fp8ext.update.transports.read_ahead import TensorRows
from vllm_fp8ext.update.transports.receiver import RankDevice, Receiver

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.02
"""Seconds between two looks: a tenth of the time that has passed, within these bounds."""


class BroadcastReceiver(Receiver[BroadcastSource]):
    """Receives buckets on the rank's thread for staging; on a GPU on that thread's stream."""

    def __init__(self, rank: RankDevice) -> None:
        super().__init__(rank)
        self._id = ""
        self._group: GroupMember | None = None
        self._buffer: Tensor | None = None

    @contextmanager
    def open(
        self,
        source: BroadcastSource,
        tensors: Sequence[StoredTensor],
        as_rows: Collection[str],
        require_wanted: Callable[[], None],
    ) -> Iterator[Iterable[ResidentTensors | TensorRows]]:
        """Yield the tensors of a bucket (`Receiver.open`).

        Raises:
            UpdateError: as `receive`.
        """
        with self.receive(source, require_wanted) as memory:
            yield self._rank.resident(tensors, memory)

    @contextmanager
    def receive(self, source: BroadcastSource, require_wanted: Callable[[], None]) -> Iterator[BufferMemory]:
        """Receive a bucket, valid inside the context.

        `require_wanted` raises once nobody wants its tensors any more.

        Raises:
            UpdateError: `transfer-timeout`: the others, or the bytes, did not come within `source.seconds`.
                `transfer-failed`: anything else, also when the group had failed before.
        """
        data = self._receive_bytes(source, require_wanted)
        try:
            yield BufferMemory(data)
        finally:
            if data.is_cuda:  # the next bucket comes to the same place
                torch.cuda.current_stream().synchronize()

    def _receive_bytes(self, source: BroadcastSource, require_wanted: Callable[[], None]) -> Tensor:
        try:
            require_wanted()
            group = self._join(source, require_wanted)
            data = self._buffer_of(source.bytes, group.device)
            group.begin(data)
            _wait(group.done, source.seconds, require_wanted, f"no bucket of {source.bytes} bytes came")
            mark = data[-MARK_BYTES:].cpu().numpy().tobytes().hex()
            if mark != source.mark:
                raise UpdateError("transfer-failed", "another bucket came than was announced")
            return data
        except BaseException:
            self._leave(source.id)
            raise

    def _join(self, source: BroadcastSource, require_wanted: Callable[[], None]) -> GroupMember:
        if source.id != self._id:
            self._leave(source.id)
            rank = source.first_rank + self._rank.rank
            group = join(source.backend, source.id, source.size, rank, self._rank.device, source.seconds)
            self._group = group
            _wait(
                group.joined,
                source.seconds,
                require_wanted,
                f"not all {source.size} processes of the group came",
            )
        if self._group is None:
            raise UpdateError("transfer-failed", "this group failed before: send through another one")
        return self._group

    def _leave(self, id: str) -> None:
        """Leave the group, as if it were the one of this id. Its buffer goes too: something may still write to it."""
        group, self._group, self._buffer, self._id = self._group, None, None, id
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
