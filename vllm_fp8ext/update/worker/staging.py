# SPDX-License-Identifier: Apache-2.0
"""Writes checkpoint tensors into a twin: quantized blocks straight into their place, everything else copied.

A block that spans two checkpoint tensors (a fused layer whose parts are not multiples of 128 rows), or parts of one, waits in
a strip of at most 128 rows until all of its rows are there. So tensors may come in any order, each may come again, and the
result depends on their contents alone. Needs no vLLM, no forward context and no collective: it may run on any thread.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import Tensor

from vllm_fp8ext.kernels.numerics.reference import BLOCK, NonFiniteError, ScaleFormat
from vllm_fp8ext.kernels.quantize import quantize_weight
from vllm_fp8ext.update.contract.manifest import Piece

_COMPARED_BYTES = 16 << 20
"""Bytes that are compared at a time."""


@dataclass
class Strip:
    """One block row that came in parts: its rows as they arrive, and which have."""

    rows_RK: Tensor
    arrived: set[int] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        return len(self.arrived) == self.rows_RK.shape[0]


@dataclass
class Outcome:
    """What is still to be asked of a tensor whose staging was queued.

    `sums`: of its quantized parts, to be added up (`quantize_weight.queue`). `values`: parts that were copied and must be
    finite. `flags`: bool `[2]`, whether codes and scales are finite, and whether the scales can be served. `equal`: bool
    scalars, whether parts are what was staged in their place before.
    """

    sums: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    flags: list[Tensor] = field(default_factory=list)
    equal: list[Tensor] = field(default_factory=list)

    def add(self, other: "Outcome") -> None:
        """What is to be asked of other rows of the tensor."""
        self.sums += other.sums
        self.values += other.values
        self.flags += other.flags
        self.equal += other.equal


class ScaleError(ValueError):
    """Block scales that can't be served."""


class TiedError(ValueError):
    """An output layer and the embedding that is served as it are not equal."""


Verdict: TypeAlias = tuple[float, float] | NonFiniteError | ScaleError | TiedError
"""Squared error and squared norm, or what is wrong: NaN or infinity in values, codes or scales; scales that are not
positive, or no powers of two where all are; a tensor that differs from the one whose place it shares."""


def verdicts(outcomes: Sequence[Outcome]) -> list[Verdict]:
    """Wait until everything is staged, once, and tell what became of each tensor."""
    table = torch.zeros(len(outcomes), 4, dtype=torch.float64)  # error, norm, not finite, wrong scales
    sums = _listed(outcomes, lambda outcome: outcome.sums)
    values = _listed(outcomes, lambda outcome: [part for part in outcome.values if part.numel()])
    flags = _listed(outcomes, lambda outcome: outcome.flags)
    added = quantize_weight.totals(sums.parts) if sums.parts else None
    infinite = _infinite(values.parts) if values.parts else None
    wrong = ~torch.stack(flags.parts) if flags.parts else None
    if added is not None:
        table[:, :3].index_add_(0, sums.owners, added.cpu().nan_to_num(0.0, 0.0))
    if infinite is not None:
        table[:, 2].index_add_(0, values.owners, infinite.double().cpu())
    if wrong is not None:
        table[:, 2:].index_add_(0, flags.owners, wrong.double().cpu())
    differ = [not all(bool(part) for part in outcome.equal) for outcome in outcomes]
    return [
        TiedError("differs from the tensor whose place it shares") if other else verdict(*row)
        for row, other in zip(table.tolist(), differ, strict=True)
    ]


@dataclass
class _Listed:
    parts: list[Tensor]
    owners: Tensor


def _listed(outcomes: Sequence[Outcome], parts: Callable[[Outcome], list[Tensor]]) -> _Listed:
    """Parts of all outcomes, and whose they are."""
    pairs = [(part, owner) for owner, outcome in enumerate(outcomes) for part in parts(outcome)]
    return _Listed([part for part, _ in pairs], torch.tensor([owner for _, owner in pairs], dtype=torch.long))


def _infinite(parts: list[Tensor]) -> Tensor:
    """For each tensor, whether something in it is NaN or infinite; on a GPU in a few launches whatever their number."""
    if not parts[0].is_cuda:
        return torch.stack([~torch.isfinite(part).all() for part in parts])
    found = torch.empty(len(parts), dtype=torch.float32, device=parts[0].device)
    for dtype in {part.dtype for part in parts}:
        alike = [index for index, part in enumerate(parts) if part.dtype == dtype]
        largest = torch._foreach_norm([parts[index] for index in alike], float("inf"))
        found[torch.tensor(alike, device=found.device)] = torch.stack(largest).float()
    return ~torch.isfinite(found)


def verdict(error: float, norm: float, infinite: float, wrong: float) -> Verdict:
    """What became of one tensor: squared error and norm, and how often something was not finite, or scales were wrong."""
    if infinite:
        return NonFiniteError("expected finite values, found NaN or infinity")
    if wrong:
        return ScaleError("expected positive scales, powers of two where the server's are")
    return error, norm


def settled(outcome: Outcome) -> tuple[float, float]:
    """Squared error and squared norm of one tensor.

    Raises:
        NonFiniteError: as in `Verdict`.
        ScaleError: likewise.
    """
    (found,) = verdicts([outcome])
    if isinstance(found, ValueError):
        raise found
    return found


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
        """Forget partly filled blocks."""
        self._strips.clear()

    def write(
        self,
        first: int,
        source: Tensor,
        outcome: Outcome,
        whole: tuple[int, int] | None = None,
    ) -> None:
        """Queue the quantization of rows from `first` on, of a tensor that has all rows of `whole` (these, by default) and
        brings them in order."""
        last = first + source.shape[0]
        rows = source.to(self.dtype)
        begin = -(-first // BLOCK) * BLOCK
        end = last if last == self.codes.shape[0] else last // BLOCK * BLOCK
        if begin < end:
            blocks = rows if (begin, end) == (first, last) else rows[begin - first : end - first]
            outcome.sums.append(self._quantize(begin, end, blocks))
        for start, stop in ((first, min(begin, last)), (max(end, begin, first), last)):
            if start < stop:
                self._fill(start, rows[start - first : stop - first], outcome, whole or (first, last))

    def copy(self, first: int, codes: Tensor, scales: Tensor, outcome: Outcome) -> None:
        """Queue the copy of whole blocks that are quantized already, to the rows from `first` on."""
        own_codes = self.codes[first : first + codes.shape[0]]
        own_scales = self.scales[first // BLOCK : first // BLOCK + scales.shape[0]]
        own_codes.copy_(codes, non_blocking=True)
        own_scales.copy_(scales, non_blocking=True)
        finite = ((own_codes.view(torch.uint8) & 0x7F) != 0x7F).all() & torch.isfinite(own_scales).all()
        good = (own_scales > 0).all()
        if self.scale_format == "pow2":
            good &= (torch.frexp(own_scales).mantissa == 0.5).all()
        outcome.flags.append(torch.stack([finite, good | ~finite]))

    def _fill(self, start: int, rows: Tensor, outcome: Outcome, whole: tuple[int, int]) -> None:
        index = start // BLOCK
        top = index * BLOCK
        strip = self._strips.get(index)
        if strip is None:
            height = min(BLOCK, self.codes.shape[0] - top)
            room = torch.empty(height, self.codes.shape[1], dtype=self.dtype, device=self.codes.device)
            strip = self._strips[index] = Strip(room)
        place = strip.rows_RK[start - top : start - top + rows.shape[0]]
        place.copy_(rows, non_blocking=True)
        outcome.values.append(place)
        strip.arrived -= set(range(start - top, whole[1] - top))  # what follows here comes again
        strip.arrived |= set(range(start - top, start - top + rows.shape[0]))
        if strip.complete:
            bottom = top + strip.rows_RK.shape[0]
            if whole[0] <= top and bottom <= whole[1]:  # it comes again only with all of its rows
                del self._strips[index]
            sums = self._quantize(top, bottom, strip.rows_RK).clone()
            sums[..., 2] = 0  # what other tensors brought is their fault
            outcome.sums.append(sums)

    def _quantize(self, start: int, stop: int, rows: Tensor) -> Tensor:
        scales = self.scales[start // BLOCK : -(-stop // BLOCK)]
        return quantize_weight.queue(rows, self.codes[start:stop], scales, self.scale_format)


class Stager:
    """Stages tensors by checkpoint name into one rank's parameters (`target` path → target). `tied`: by the name of an output
    layer that goes where the embedding goes, the embedding's."""

    def __init__(
        self,
        pieces: Mapping[str, tuple[Piece, ...]],
        quantized: Mapping[str, QuantizedTarget],
        plain: Mapping[str, Tensor],
        tied: Mapping[str, str] | None = None,
    ) -> None:
        self.tied = tied or {}
        self.pieces = {**pieces, **{head: pieces[embedding] for head, embedding in self.tied.items()}}
        self.quantized = quantized
        self.plain = plain

    def reset(self) -> None:
        """Forget all partly filled blocks: a new update begins."""
        for target in self.quantized.values():
            target.reset()

    def rehearse(self) -> None:
        """Run what staging runs, on a place of its own as large as the smallest target."""
        outcome = Outcome([], [torch.zeros_like(part) for part in list(self.plain.values())[:1]])
        if self.quantized:
            like = min(self.quantized.values(), key=lambda target: target.codes.numel())
            codes, scales = torch.empty_like(like.codes), torch.empty_like(like.scales)
            values = torch.zeros(codes.shape, dtype=like.dtype, device=codes.device)
            QuantizedTarget(codes, scales, like.dtype, like.scale_format).write(0, values, outcome)
        settled(outcome)

    def stage(self, name: str, rows: Tensor, first: int = 0) -> Outcome:
        """Queue the staging of one tensor, which this rank may have no part of, or of its rows from `first` on: then all of
        them must come, in order, and the outcomes be added up.

        What is found wrong has been written all the same: the tensor counts as not staged until it comes again.
        """
        outcome = Outcome()
        for whole in self.pieces.get(name, ()):
            piece = among(whole, first, rows)
            if piece is None:
                continue
            sizes = tuple(stop - start for start, stop in piece.source)
            source = rows if sizes == rows.shape else rows[_extents(piece, first)]
            target = self.quantized.get(piece.target)
            if target is not None:
                top, (start, stop) = whole.origin[0], whole.source[0]
                target.write(piece.origin[0], source, outcome, (top, top + stop - start))
            else:
                destination = place(self.plain[piece.target], piece)
                destination.copy_(source, non_blocking=True)
                if destination.is_floating_point():
                    outcome.values.append(destination)
        return outcome

    def compare(self, name: str, rows: Tensor, first: int = 0) -> Outcome:
        """Queue the comparison of one tensor, or of its rows from `first` on, with what is in its place, as bytes of the
        served dtype. Nothing is written."""
        outcome = Outcome()
        for whole in self.pieces.get(name, ()):
            piece = among(whole, first, rows)
            if piece is not None:
                part = rows[_extents(piece, first)]
                outcome.equal.append(same_bytes(part, place(self.plain[piece.target], piece)))
        return outcome

    def stage_codes(self, name: str, codes: Tensor, scales: Tensor, first: int = 0) -> Outcome:
        """The same for a tensor that comes quantized: E4M3 `[N, K]`, or its rows from a multiple of 128 on, and all of its
        scales, fp32 `[ceil(N/128), ceil(K/128)]`, as they are."""
        outcome = Outcome()
        for whole in self.pieces.get(name, ()):
            piece = among(whole, first, codes)
            if piece is None:
                continue
            (top, bottom), (left, right) = piece.source
            blocks = scales[top // BLOCK : -(-bottom // BLOCK), left // BLOCK : -(-right // BLOCK)]
            self.quantized[piece.target].copy(piece.origin[0], codes[_extents(piece, first)], blocks, outcome)
        return outcome


def among(piece: Piece, first: int, rows: Tensor) -> Piece | None:
    """The part of a piece that lies in these rows of its tensor, from `first` on."""
    if not piece.source:
        return piece
    (start, stop), *others = piece.source
    top, bottom = max(start, first), min(stop, first + rows.shape[0])
    if top >= bottom:
        return None
    if (top, bottom) == (start, stop):
        return piece
    origin = (piece.origin[0] + top - start, *piece.origin[1:])
    return replace(piece, source=((top, bottom), *others), origin=origin)


def _extents(piece: Piece, first: int) -> tuple[slice, ...]:
    """Where a piece lies in rows from `first` on."""
    slices = [slice(start, stop) for start, stop in piece.source]
    if slices:
        slices[0] = slice(slices[0].start - first, slices[0].stop - first)
    return tuple(slices)


def same_bytes(values: Tensor, there: Tensor) -> Tensor:
    """Whether values, once converted, are these, bit for bit: a bool scalar on their device, found some rows at a time."""
    step = max(1, _COMPARED_BYTES // max(1, there[:1].nbytes)) if there.dim() else 1
    parts = zip(values.split(step), there.split(step), strict=True) if there.dim() else [(values, there)]
    same = torch.ones((), dtype=torch.bool, device=there.device)
    for part, known in parts:
        found = part.to(known.device, known.dtype).contiguous().view(-1).view(torch.uint8)
        same &= (found == known.contiguous().view(-1).view(torch.uint8)).all()
    return same


def place(parameter: Tensor, piece: Piece) -> Tensor:
    """The part of a parameter that a piece fills."""
    extents = zip(piece.origin, piece.source, strict=True)
    return parameter[tuple(slice(origin, origin + stop - start) for origin, (start, stop) in extents)]
