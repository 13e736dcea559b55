# SPDX-License-Identifier: Apache-2.0
"""Codes and scales of one parameter, which tensors are quantized into."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vllm_fp8ext.kernels.numerics.reference import BLOCK, ScaleFormat
from vllm_fp8ext.kernels.quantize import quantize_weight


@dataclass
class Strip:
    """One block row that comes in parts: its rows `[R, K]` as they arrive, and which have."""

    rows_RK: Tensor
    arrived: set[int] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        """True when all rows are there."""
        return len(self.arrived) == self.rows_RK.shape[0]


class QuantizedTarget:
    """Codes and scales of one parameter `[N, K]`. `dtype`: what tensors are converted to before they are quantized."""

    def __init__(
        self, codes_NK: Tensor, scales_NbKb: Tensor, dtype: torch.dtype, scale_format: ScaleFormat
    ) -> None:
        self.codes = codes_NK
        self.scales = scales_NbKb
        self.dtype = dtype
        self.scale_format = scale_format
        self._strips: dict[int, Strip] = {}

    def reset(self) -> None:
        """Forget partly filled block rows."""
        self._strips.clear()

    def scales_of(self, start: int, stop: int) -> Tensor:
        """Return the scales of the blocks that hold rows `start` to `stop`."""
        return self.scales[start // BLOCK : -(-stop // BLOCK)]

    def part(self, start: int, left: int, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the codes and scales of a part, from row `start` and column `left` on.

        `shape`: `[rows, columns]`.
        """
        stop, right = start + shape[0], left + shape[1]
        codes, scales = self.codes[start:stop], self.scales_of(start, stop)
        if shape[1] == self.codes.shape[1]:
            return codes, scales
        return codes[:, left:right], scales[:, left // BLOCK : -(-right // BLOCK)]

    def quantize(self, start: int, rows: Tensor, left: int = 0) -> Tensor:
        """Queue the quantization of whole blocks from row `start` and column `left` on.

        Returns the sums of `quantize_weight.queue`.
        """
        codes, scales = self.part(start, left, rows.shape)
        if codes.is_contiguous() or not codes.is_cuda:
            return quantize_weight.queue(rows, codes, scales, self.scale_format)
        room = quantize_weight.empty_like(rows, codes.device)
        sums = quantize_weight.queue(rows, *room, self.scale_format)
        codes.copy_(room[0], non_blocking=True)
        scales.copy_(room[1], non_blocking=True)
        return sums

    def fill(self, start: int, rows: Tensor, tensor_rows: tuple[int, int]) -> tuple[Tensor, Tensor | None]:
        """Queue the copy of rows into their block row; quantize it when it is complete.

        `tensor_rows`: start and stop of all rows that their tensor has here, which come in order. Returns the rows where they
        wait, and the sums of `quantize_weight.queue` of a block row that is complete: only of finite values, since those that
        are not are the fault of who brought them.
        """
        index = start // BLOCK
        top = index * BLOCK
        strip = self._strips.get(index)
        if strip is None:
            height = min(BLOCK, self.codes.shape[0] - top)
            room = torch.empty(height, self.codes.shape[1], dtype=self.dtype, device=self.codes.device)
            strip = self._strips[index] = Strip(room)
        first, last = start - top, start - top + rows.shape[0]
        waiting = strip.rows_RK[first:last]
        waiting.copy_(rows, non_blocking=True)
        strip.arrived -= set(range(first, tensor_rows[1] - top))  # what follows these rows comes again
        strip.arrived |= set(range(first, last))
        if not strip.complete:
            return waiting, None
        bottom = top + strip.rows_RK.shape[0]
        if tensor_rows[0] <= top and bottom <= tensor_rows[1]:  # it comes again only with all of its rows
            del self._strips[index]
        sums = self.quantize(top, strip.rows_RK).clone()
        sums[..., 2] = 0
        return waiting, sums
