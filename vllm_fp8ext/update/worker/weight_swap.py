# SPDX-License-Identifier: Apache-2.0
"""Swaps the contents of live and shadow parameters; addresses stay, as CUDA graphs expect."""

import zlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from vllm_fp8ext.kernels.memory.swap import Swap

_WORKSPACE_BYTES = 64 << 20


class WeightSwap:
    """Swaps the contents of pairs of equally laid out tensors together.

    `inplace`: both sides are the same, and there is nothing to swap. A swap is its own inverse: `run` twice restores
    everything. On a GPU it is one launch, which waits for its turn on the current stream. On a CPU an interrupted `run` is
    undone before its error is raised; when that fails too, `broken` is set and the contents are undefined.
    """

    def __init__(self, pairs: list[tuple[Tensor, Tensor]], *, inplace: bool = False) -> None:
        self.inplace = inplace
        self.pairs = [(_flat(live), _flat(shadow)) for live, shadow in pairs]
        self.broken = False
        self._copies = 3
        """Copies that are done of the swap at hand."""
        largest = max((live.numel() for live, _ in self.pairs), default=0)
        self._device = self.pairs[0][0].device if self.pairs else torch.device("cpu")
        self._launch = self._compiled() if self._device.type == "cuda" else None
        if self._launch is not None:
            largest = 0
        if inplace:
            largest = 0
        self._workspace = torch.empty(min(largest, _WORKSPACE_BYTES), dtype=torch.uint8, device=self._device)

    def _compiled(self) -> "Swap":
        """Run the launches so that they are compiled: the swap twice, which changes nothing."""
        from vllm_fp8ext.kernels.memory.swap import Swap

        swap = Swap(self.pairs)
        if not self.inplace:
            swap.run()
            swap.run()
        for side in (0, 1):
            swap.fingerprint(side)
        return swap

    @property
    def bytes(self) -> int:
        """Bytes that the shadow's side takes."""
        return 0 if self.inplace else sum(live.numel() for live, _ in self.pairs)

    def run(self) -> None:
        """Swap everything.

        On a GPU that is queued on the current stream: what follows there finds it done, who looks from elsewhere has to wait
        for it.
        """
        if self.inplace:
            self.broken = False
            return
        if self._launch is not None:
            self.broken = True  # one of two launches may fail
            self._launch.run()
            self.broken = False
            return
        swapped: list[tuple[Tensor, Tensor]] = []
        try:
            for live, shadow in self._slices():
                self._copies = 0
                swapped.append((live, shadow))
                self._swap(live, shadow)
        except BaseException:
            self._undo(swapped)
            raise
        self.broken = False

    def restore(self) -> None:
        """Zero the pairs, whose memory lost its contents, and renew the launches.

        What no update brings, padding that kernels compute with, stays zero.
        """
        for live, shadow in self.pairs:
            live.zero_()
            shadow.zero_()
        if self._launch is not None:
            torch.cuda.synchronize(self._device)  # staging has a stream of its own
            self._launch = type(self._launch)(self.pairs)

    def fingerprint(self, *, shadow: bool) -> int:
        """Return a number that tells the contents of one side from others, on this device.

        Not to be called before a `run` is done.
        """
        if self._launch is not None:
            return self._launch.fingerprint(int(shadow))
        checksum = 0
        for pair in self.pairs:
            checksum = zlib.crc32(memoryview(pair[shadow].numpy()), checksum)
        return checksum

    def _undo(self, swapped: list[tuple[Tensor, Tensor]]) -> None:
        try:
            if swapped and self._copies < 3:  # the last swap is half done
                live, shadow = swapped.pop()
                if self._copies == 2:
                    shadow.copy_(live)
                if self._copies >= 1:
                    live.copy_(self._workspace[: live.numel()])
            for live, shadow in reversed(swapped):
                self._swap(live, shadow)
        except BaseException:
            self.broken = True
            raise

    def _swap(self, live: Tensor, shadow: Tensor) -> None:
        saved = self._workspace[: live.numel()]
        saved.copy_(live)
        self._copies = 1
        live.copy_(shadow)
        self._copies = 2
        shadow.copy_(saved)
        self._copies = 3

    def _slices(self) -> list[tuple[Tensor, Tensor]]:
        step = self._workspace.numel()
        return [
            (live[start : start + step], shadow[start : start + step])
            for live, shadow in self.pairs
            for start in range(0, live.numel(), step)
        ]


def _flat(tensor: Tensor) -> Tensor:
    if not tensor.is_contiguous():
        raise ValueError(f"only contiguous tensors are swapped, found strides {tensor.stride()}")
    return tensor.detach().view(-1).view(torch.uint8)
