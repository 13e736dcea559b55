# SPDX-License-Identifier: Apache-2.0
"""The receiving side of vLLM's weight transfer, in one rank."""

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_fp8ext.update.transports.group_receiver import GroupReceiver
from vllm_fp8ext.update.transports.native.group import join
from vllm_fp8ext.update.transports.native.message import NativeSource
from vllm_fp8ext.update.transports.nccl.group import GroupMember


class NativeReceiver(GroupReceiver[NativeSource]):
    """Receives broadcasts side by side in one buffer."""

    _WAY_OUT = "call init_weight_transfer_engine again"

    def _key_of(self, source: NativeSource) -> int:
        return source.native

    def _join(self, source: NativeSource) -> GroupMember:
        return join(source, source.first_rank + self._rank.rank, self._rank.device)

    def _receive_bytes(self, source: NativeSource, require_wanted: Callable[[], None]) -> Tensor:
        if source.native:
            return super()._receive_bytes(source, require_wanted)
        self._leave(0)
        return torch.empty(0, dtype=torch.uint8, device=self._rank.device)

    def _broadcast(self, source: NativeSource, group: GroupMember, wait: Callable[[str], None]) -> Tensor:
        data, start = self._buffer_of(source.bytes, group.device), 0
        for number, size in enumerate(source.parts):
            group.begin(data[start : start + size])
            wait(f"broadcast {number + 1} of {len(source.parts)}, of {size} bytes, did not come")
            start += size
        for place, to, size in source.moves:
            data[to : to + size].copy_(data[place : place + size])
        return data
