# SPDX-License-Identifier: Apache-2.0
"""Writes checkpoint tensors into a twin: quantized blocks straight into their place, everything else copied.

A block that spans two checkpoint tensors (a fused layer whose parts are not multiples of 128 rows) waits in a strip of at
most 128 rows until all of its rows are there. So tensors may come in any order, each may come again, and the result
depends on their contents alone. Needs no vLLM, no forward context and no collective: it may run on any thread.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vllm_fp8ext.kernels.quantize_weight import quantize_weight
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


class ScaleError(ValueError):
    """Block scales that can't be served."""


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

    def write(self, first: int, source: Tensor) -> tuple[float, float]:
        """Quantize rows from `first` on; returns squared error and squared norm of what became final."""
        last = first + source.shape[0]
        rows = source.to(self.dtype)
        begin = -(-first // BLOCK) * BLOCK
        end = last if last == self.codes.shape[0] else last // BLOCK * BLOCK
        error = norm = 0.0
        if begin < end:
            error, norm = self._quantize(begin, end, rows[begin - first : end - first])
        for start, stop in ((first, min(begin, last)), (max(end, begin, first), last)):
            if start < stop:
                more_error, more_norm = self._fill(start, rows[start - first : stop - first])
                error, norm = error + more_error, norm + more_norm
        return error, norm

    def copy(self, first: int, codes: Tensor, scales: Tensor) -> None:
        """Take whole blocks that are quantized already, as rows from `first` on.

        Raises:
            NonFiniteError: NaN in the codes, NaN or infinity in the scales.
            ScaleError: scales that are not positive, or no powers of two where all are.
        """
        if bool(((codes.view(torch.uint8) & 0x7F) == 0x7F).any()) or not bool(torch.isfinite(scales).all()):
            raise NonFiniteError("expected finite codes and scales, found NaN or infinity")
        if not bool((scales > 0).all()):
            raise ScaleError("expected positive scales, found zero or less")
        if self.scale_format == "pow2" and bool((torch.frexp(scales).mantissa != 0.5).any()):
            raise ScaleError("expected powers of two, the server's scale_format, found other scales")
        self.codes[first : first + codes.shape[0]].copy_(codes)
        self.scales[first // BLOCK : first // BLOCK + scales.shape[0]].copy_(scales)

    def _fill(self, start: int, rows: Tensor) -> tuple[float, float]:
        if not bool(torch.isfinite(rows).all()):
            raise NonFiniteError("expected finite values, found NaN or infinity")
        index = start // BLOCK
        top = index * BLOCK
        strip = self._strips.get(index)
        if strip is None:
            height = min(BLOCK, self.codes.shape[0] - top)
            strip = self._strips[index] = Strip(torch.empty(height, self.codes.shape[1], dtype=self.dtype))
        strip.rows_RK[start - top : start - top + rows.shape[0]] = rows
        strip.spans[start - top] = rows.shape[0]
        if not strip.complete:
            return 0.0, 0.0
        return self._quantize(top, top + strip.rows_RK.shape[0], strip.rows_RK)

    def _quantize(self, start: int, stop: int, rows: Tensor) -> tuple[float, float]:
        scales = self.scales[start // BLOCK : -(-stop // BLOCK)]
        return quantize_weight(rows, self.codes[start:stop], scales, self.scale_format)


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

    def stage(self, name: str, tensor: Tensor) -> tuple[float, float]:
        """Stage one tensor of the manifest's shape; returns squared quantization error and squared norm.

        Raises:
            NonFiniteError: the part that this rank serves holds NaN or infinity.
        """
        error = norm = 0.0
        for piece in self.pieces[name]:
            source = tensor[tuple(slice(start, stop) for start, stop in piece.source)]
            target = self.quantized.get(piece.target)
            if target is not None:
                more_error, more_norm = target.write(piece.origin[0], source)
                error, norm = error + more_error, norm + more_norm
                continue
            destination = place(self.plain[piece.target], piece)
            values = source.to(destination.dtype)
            if not bool(torch.isfinite(values).all()):
                raise NonFiniteError(f"{piece.target}: expected finite values, found NaN or infinity")
            destination.copy_(values)
        return error, norm

    def stage_codes(self, name: str, codes: Tensor, scales: Tensor) -> None:
        """Stage a tensor that comes quantized: E4M3 `[N, K]` and fp32 `[ceil(N/128), ceil(K/128)]`, as they are.

        Raises:
            NonFiniteError, ScaleError: what this rank serves of it can't be served.
        """
        for piece in self.pieces[name]:
            (top, bottom), (left, right) = piece.source
            part = codes[top:bottom, left:right]
            blocks = scales[top // BLOCK : -(-bottom // BLOCK), left // BLOCK : -(-right // BLOCK)]
            self.quantized[piece.target].copy(piece.origin[0], part, blocks)


def place(parameter: Tensor, piece: Piece) -> Tensor:
    """The part of a parameter that a piece fills."""
    extents = zip(piece.origin, piece.source, strict=True)
    return parameter[tuple(slice(origin, origin + stop - start) for origin, (start, stop) in extents)]
