# SPDX-License-Identifier: Apache-2.0
"""The receiving side of all transports, in one rank."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

import torch

from vllm_fp8ext.update.contract.safetensors_header import StoredTensor
from vllm_fp8ext.update.transports.gather import Gather, Group
from vllm_fp8ext.update.transports.memory import Memory, Placed
from vllm_fp8ext.update.transports.read_ahead import Rows
from vllm_fp8ext.update.transports.registry import TRANSPORTS
from vllm_fp8ext.update.transports.transport import Source

CPU = torch.device("cpu")

S = TypeVar("S", bound=Source)


class RankDevice:
    """What the receivers of one rank share: its number, its device, and the room on its GPU."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank = rank
        self.device = device
        self.on_gpu = device.type == "cuda"
        self.gather = Gather(device)

    def placed(self, tensors: Sequence[StoredTensor], memory: Memory) -> Iterable[Placed | Rows]:
        """Return tensors that lie in some memory: together where that is the rank's GPU, else as whole rows of each."""
        placed = Placed(tensors, memory)
        return [placed] if self.on_gpu and memory.device == self.device else placed

    def plan(self, tensors: Sequence[StoredTensor], apart: Collection[str]) -> list[Group]:
        """Plan how tensors that are read on the host are brought to the device. On a CPU everything comes as rows."""
        names = apart if self.on_gpu else {stored.spec.name for stored in tensors}
        return self.gather.plan(tensors, names)


class Receiver(ABC, Generic[S]):
    """One transport's receiving side, in one rank. Works on the rank's staging thread, one chunk after the other."""

    def __init__(self, rank: RankDevice) -> None:
        self._rank = rank

    @abstractmethod
    def open(
        self,
        source: S,
        tensors: Sequence[StoredTensor],
        apart: Collection[str],
        require_wanted: Callable[[], None],
    ) -> AbstractContextManager[Iterable[Placed | Rows]]:
        """Yield these tensors, in this order, each valid until the next is taken and inside the context.

        They come together where they lie on the rank's GPU, or are brought there, if they are none of `apart` (by name) nor
        larger than the room; else as rows. What has to be waited for is given up when `require_wanted` raises.

        Raises:
            UpdateError: on entering, reading or leaving.
        """

    def rehearse(self) -> None:
        """Load what is loaded when it is needed first."""

    def tidy(self) -> None:
        """Do what is left of sources that were open, and what nobody has to wait for."""


class Receivers:
    """Opens the sources of one rank, whatever transport they are of. A transport's receiver is made when it is first needed,
    and kept."""

    def __init__(self, rank: int = 0, device: torch.device = CPU) -> None:
        self._rank = RankDevice(rank, device)
        self._made: dict[str, Receiver[Any]] = {}

    def rehearse(self) -> None:
        """Load what is loaded when it is needed first."""
        if self._rank.on_gpu:
            for name in TRANSPORTS:
                self._receiver(name).rehearse()

    def open(
        self,
        source: Source,
        tensors: Sequence[StoredTensor],
        apart: Collection[str] = (),
        require_wanted: Callable[[], None] = lambda: None,
    ) -> AbstractContextManager[Iterable[Placed | Rows]]:
        """Open a source by the receiver of its transport (`Receiver.open`)."""
        return self._receiver(source.transport).open(source, tensors, apart, require_wanted)

    def tidy(self) -> None:
        """Do what is left of sources that were open, and what nobody has to wait for."""
        for receiver in self._made.values():
            receiver.tidy()

    def _receiver(self, name: str) -> Receiver[Any]:
        if name not in self._made:
            self._made[name] = TRANSPORTS[name].load_receiver()(self._rank)
        return self._made[name]
