# SPDX-License-Identifier: Apache-2.0
"""The receiving side of all transports, in one rank."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

import torch

from vllm_fp8ext.update.contract.safetensors_header import StoredTensor
from vllm_fp8ext.update.transports.gather import Gather, TensorGroup
from vllm_fp8ext.update.transports.memory import Memory, ResidentTensors
from vllm_fp8ext.update.transports.read_ahead import TensorRows
from vllm_fp8ext.update.transports.registry import TRANSPORTS
from vllm_fp8ext.update.transports.transport import Source

CPU = torch.device("cpu")

S = TypeVar("S", bound=Source)


class RankDevice:
    """Shared state of the receivers of one rank: its number, its device, and the buffer on its GPU."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank = rank
        self.device = device
        self.on_gpu = device.type == "cuda"
        self.gather = Gather(device)

    def resident(
        self, tensors: Sequence[StoredTensor], memory: Memory
    ) -> Iterable[ResidentTensors | TensorRows]:
        """Return tensors that lie in some memory: together where that is the rank's GPU, else as whole rows of each."""
        resident = ResidentTensors(tensors, memory)
        return [resident] if self.on_gpu and memory.device == self.device else resident

    def copy_schedule(self, tensors: Sequence[StoredTensor], as_rows: Collection[str]) -> list[TensorGroup]:
        """Return the groups in which tensors are copied to the device; on a CPU everything comes as rows.

        As `Gather.copy_schedule`.
        """
        names = as_rows if self.on_gpu else {stored.spec.name for stored in tensors}
        return self.gather.copy_schedule(tensors, names)


class Receiver(ABC, Generic[S]):
    """One transport's receiving side, in one rank. Works on the rank's staging thread, one chunk after the other."""

    def __init__(self, rank: RankDevice) -> None:
        self._rank = rank

    @abstractmethod
    def open(
        self,
        source: S,
        tensors: Sequence[StoredTensor],
        as_rows: Collection[str],
        require_wanted: Callable[[], None],
    ) -> AbstractContextManager[Iterable[ResidentTensors | TensorRows]]:
        """Yield these tensors, in this order.

        Each is valid until the next is taken and inside the context. They come together where they lie on the rank's GPU, or
        are brought there, if they are none of `as_rows` (by name) nor larger than its buffer; else as rows. What has to be
        waited for is given up when `require_wanted` raises.

        Raises:
            UpdateError: on entering, reading or leaving.
        """

    def warm_up(self) -> None:
        """Load what would be loaded when it is needed first."""

    def close_deferred(self) -> None:
        """Close what sources have left open, since nobody had to wait for it."""

    def close_shared(self) -> None:
        """Close what chunks of one update share. Other threads may call it, while no chunk is being received."""


class Receivers:
    """Opens the sources of one rank, whatever transport they are of.

    A transport's receiver is made when it is first needed, and kept.
    """

    def __init__(self, rank: int = 0, device: torch.device = CPU) -> None:
        self._rank = RankDevice(rank, device)
        self._receivers: dict[str, Receiver[Any]] = {}

    def warm_up(self) -> None:
        """Load what would be loaded when it is needed first."""
        if self._rank.on_gpu:
            for name in TRANSPORTS:
                self._receiver(name).warm_up()

    def open(
        self,
        source: Source,
        tensors: Sequence[StoredTensor],
        as_rows: Collection[str] = (),
        require_wanted: Callable[[], None] = lambda: None,
    ) -> AbstractContextManager[Iterable[ResidentTensors | TensorRows]]:
        """Open a source by the receiver of its transport (`Receiver.open`)."""
        return self._receiver(source.transport).open(source, tensors, as_rows, require_wanted)

    def resident(
        self, tensors: Sequence[StoredTensor], memory: Memory
    ) -> Iterable[ResidentTensors | TensorRows]:
        """Return tensors of this process (`RankDevice.resident`)."""
        return self._rank.resident(tensors, memory)

    def close_deferred(self) -> None:
        """Close what sources have left open, since nobody had to wait for it."""
        for receiver in self._receivers.values():
            receiver.close_deferred()

    def close_shared(self) -> None:
        """Close what chunks of one update share."""
        for receiver in list(self._receivers.values()):
            receiver.close_shared()

    def _receiver(self, name: str) -> Receiver[Any]:
        if name not in self._receivers:
            self._receivers[name] = TRANSPORTS[name].load_receiver()(self._rank)
        return self._receivers[name]
