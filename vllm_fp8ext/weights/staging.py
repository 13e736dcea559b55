# SPDX-License-Identifier: Apache-2.0
"""Writes checkpoint tensors into a twin: quantized blocks straight into their place, everything else copied.

A block that spans two checkpoint tensors (a fused layer whose parts are not multiples of 128 rows) waits in a strip of at
most 128 rows until all of its rows are there. So tensors may come in any order, each may come again, and the result
depends on their contents alone. Needs no vLLM, no forward context and no collective: it may run on any thread.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from vllm_fp8ext.kernels import quantize_weight
from vllm_fp8ext.kernels.reference import BLOCK, NonFiniteError, ScaleFormat
from vllm_fp8ext.weights.manifest import Piece


@dataclass
class Strip:
    """One block row that several tensors share: its rows as they arrive, and which spans have."""

    rows_RK: Tensor
    spans: dict[int, int] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return sum(self.spans.values()) == self.rows_RK.shape[0]


Outcome: TypeAlias = Tensor
"""What became of a part of a tensor: fp64 `[4]` of squared error, squared norm, and 1 or 0 for finite values and for scales
that can be served."""


class ScaleError(ValueError):
    """Block scales that can't be served."""


def settled(outcome: Outcome) -> tuple[float, float]:
    """Squared error and squared norm.

    Raises:
        NonFiniteError: NaN or infinity, in values, codes or scales.
        ScaleError: scales that are not positive, or no powers of two where all are.
    """
    error, norm, finite, good = outcome.tolist()
    if not finite:
        raise NonFiniteError("expected finite values, found NaN or infinity")
    if not good:
        raise ScaleError("expected positive scales, powers of two where the server's are")
    return error, norm


class QuantizedTarget:
    """Codes and scales of one twin parameter `[N, K]`."""

    def __init__(
        self, codes_NK: Tensor, scales_NbKb: Tensor, dtype: torch.dtype, scale_format: ScaleFormat
    ) -> None:
        self.codes = codes_NK
        self.scales = scales_NbKb
        self.dtype = dtype
        self.scale_format = scale_format
        self._strips: dict[int, Strip] = {}

    def reset(self) -> None:
        self._strips.clear()

    def write(self, first: int, source: Tensor) -> list[Tensor]:
        """Queue the quantization of rows from `first` on; outcomes (see `Outcome`) of what became final."""
        last = first + source.shape[0]
        rows = source.to(self.dtype)
        begin = -(-first // BLOCK) * BLOCK
        end = last if last == self.codes.shape[0] else last // BLOCK * BLOCK
        found = []
        if begin < end:
            found.append(self._quantize(begin, end, rows[begin - first : end - first]))
        for start, stop in ((first, min(begin, last)), (max(end, begin, first), last)):
            if start < stop:
                found.append(self._fill(start, rows[start - first : stop - first]))
        return found

    def copy(self, first: int, codes: Tensor, scales: Tensor) -> Tensor:
        """Queue the copy of whole blocks that are quantized already, to the rows from `first` on; their outcome."""
        own_codes = self.codes[first : first + codes.shape[0]]
        own_scales = self.scales[first // BLOCK : first // BLOCK + scales.shape[0]]
        own_codes.copy_(codes, non_blocking=True)
        own_scales.copy_(scales, non_blocking=True)
        finite = ((own_codes.view(torch.uint8) & 0x7F) != 0x7F).all() & torch.isfinite(own_scales).all()
        good = (own_scales > 0).all()
        if self.scale_format == "pow2":
            good &= (torch.frexp(own_scales).mantissa == 0.5).all()
        return torch.stack([finite.new_zeros(()), finite.new_zeros(()), finite, good | ~finite]).double()

    def _fill(self, start: int, rows: Tensor) -> Tensor:
        finite = torch.isfinite(rows).all()
        index = start // BLOCK
        top = index * BLOCK
        strip = self._strips.get(index)
        if strip is None:
            height = min(BLOCK, self.codes.shape[0] - top)
            room = torch.empty(height, self.codes.shape[1], dtype=self.dtype, device=self.codes.device)
            strip = self._strips[index] = Strip(room)
        strip.rows_RK[start - top : start - top + rows.shape[0]].copy_(rows, non_blocking=True)
        strip.spans[start - top] = rows.shape[0]
        if not strip.complete:
            zero = torch.zeros((), dtype=torch.float64, device=finite.device)
            return torch.stack([zero, zero, finite.double(), zero + 1])
        outcome = self._quantize(top, top + strip.rows_RK.shape[0], strip.rows_RK).nan_to_num(0.0, 0.0)
        outcome[2] = finite  # of these rows: what others brought is their fault
        return outcome

    def _quantize(self, start: int, stop: int, rows: Tensor) -> Tensor:
        scales = self.scales[start // BLOCK : -(-stop // BLOCK)]
        outcome = quantize_weight.queue(rows, self.codes[start:stop], scales, self.scale_format)
        return torch.cat([outcome, outcome.new_ones(1)])


class Stager:
    """Stages tensors by checkpoint name into one rank's parameters (`target` path → target)."""

    def __init__(
        self,
        pieces: Mapping[str, tuple[Piece, ...]],
        quantized: Mapping[str, QuantizedTarget],
        plain: Mapping[str, Tensor],
    ) -> None:
        self.pieces = pieces
        self.quantized = quantized
        self.plain = plain

    def reset(self) -> None:
        """Forget all partly filled blocks: a new update begins."""
        for target in self.quantized.values():
            target.reset()

    def stage(self, name: str, tensor: Tensor) -> Outcome:
        """Queue the staging of one tensor of the manifest's shape, and tell its outcome (on the device of the twin).

        What is found wrong has been written all the same: the tensor counts as not staged until it comes again.
        """
        found = []
        for piece in self.pieces[name]:
            source = tensor[tuple(slice(start, stop) for start, stop in piece.source)]
            target = self.quantized.get(piece.target)
            if target is not None:
                found += target.write(piece.origin[0], source)
                continue
            destination = place(self.plain[piece.target], piece)
            destination.copy_(source, non_blocking=True)
            finite = torch.isfinite(destination).all().double()
            found.append(torch.stack([finite * 0, finite * 0, finite, finite * 0 + 1]))
        return _together(found)

    def stage_codes(self, name: str, codes: Tensor, scales: Tensor) -> Outcome:
        """The same for a tensor that comes quantized: E4M3 `[N, K]` and fp32 `[ceil(N/128), ceil(K/128)]`, as they are."""
        found = []
        for piece in self.pieces[name]:
            (top, bottom), (left, right) = piece.source
            part = codes[top:bottom, left:right]
            blocks = scales[top // BLOCK : -(-bottom // BLOCK), left // BLOCK : -(-right // BLOCK)]
            found.append(self.quantized[piece.target].copy(piece.origin[0], part, blocks))
        return _together(found)


def _together(outcomes: list[Outcome]) -> Outcome:
    if not outcomes:
        return torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    device = outcomes[-1].device
    found = torch.stack([outcome.to(device) for outcome in outcomes])
    return torch.cat([found[:, :2].sum(0), found[:, 2:].amin(0)])


def place(parameter: Tensor, piece: Piece) -> Tensor:
    """The part of a parameter that a piece fills."""
    extents = zip(piece.origin, piece.source, strict=True)
    return parameter[tuple(slice(origin, origin + stop - start) for origin, (start, stop) in extents)]
