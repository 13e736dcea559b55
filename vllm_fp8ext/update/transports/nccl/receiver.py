# SPDX-License-Identifier: Apache-2.0
"""Receives a trainer's buckets in one rank; each ends with the mark that was announced."""

from collections.abc import Callable

from torch import Tensor

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.transports.group_receiver import GroupReceiver
from vllm_fp8ext.update.transports.nccl.group import GroupMember, join
from vllm_fp8ext.update.transports.nccl.message import MARK_BYTES, BroadcastSource


class BroadcastReceiver(GroupReceiver[BroadcastSource]):
    """Receives buckets, one broadcast each."""

    _WAY_OUT = "send through another one"

    def _key_of(self, source: BroadcastSource) -> str:
        return source.id

    def _join(self, source: BroadcastSource) -> GroupMember:
        rank = source.first_rank + self._rank.rank
        return join(source.backend, source.id, source.size, rank, self._rank.device, source.seconds)

    def _broadcast(self, source: BroadcastSource, group: GroupMember, wait: Callable[[str], None]) -> Tensor:
        data = self._buffer_of(source.bytes, group.device)
        group.begin(data)
        wait(f"no bucket of {source.bytes} bytes came")
        if data[-MARK_BYTES:].cpu().numpy().tobytes().hex() != source.mark:
            raise UpdateError("transfer-failed", "another bucket came than was announced")
        return data
