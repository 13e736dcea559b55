# SPDX-License-Identifier: Apache-2.0
"""Stages tensors that lie on the rank's GPU, all at once: the same ones come with every update, so what becomes of them is
listed once, and an update brings addresses alone. Little is left to do for each tensor, and little of Python's interpreter
is taken from the engine beside it.
"""

import math
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm_fp8ext.kernels import copy_together
from vllm_fp8ext.kernels.copy_together import CopyTogether
from vllm_fp8ext.kernels.quantize_together import UNIT, Place, QuantizeTogether
from vllm_fp8ext.kernels.reference import BLOCK, ScaleFormat, blocks
from vllm_fp8ext.weights.manifest import Piece, TensorSpec
from vllm_fp8ext.weights.pace import Pace
from vllm_fp8ext.weights.safetensors_header import StoredTensor
from vllm_fp8ext.weights.source import Placed
from vllm_fp8ext.weights.staging import Stager, Verdict, place, verdict

_KEPT = 256
"""Lists that are kept: of so many different chunks."""


@dataclass(frozen=True, slots=True)
class Errand:
    """One launch, for parts of tensors: `sources` and `owners` (int64 `[parts]`) number these among all that came, and among
    those that are taken; parts begin `offsets` bytes behind their tensors' beginnings."""

    sources: Tensor
    owners: Tensor
    offsets: Tensor
    run: QuantizeTogether | CopyTogether


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a tensor, and where it goes: it is quantized with scales of this format, or copied. `source`, `owner` and
    `offset` as in `Errand`."""

    dtype: torch.dtype
    offset: int
    to: Place | Tensor
    scale_format: ScaleFormat | None = None
    source: int = -1
    owner: int = -1

    @property
    def kind(self) -> tuple[object, ...]:
        """What those have in common that go together."""
        return self.dtype, self.scale_format, isinstance(self.to, Place) and self.to.even


@dataclass(frozen=True, slots=True)
class Chores:
    """What becomes of some tensors: those that are taken, by name."""

    names: list[str]
    errands: list[Errand]


@dataclass(frozen=True, slots=True)
class Queued:
    """Tensors whose staging was queued, and what the GPU will say of their parts."""

    names: list[str]
    found: list[tuple[Tensor, Tensor]]
    """Whose they are, int64 `[parts]`, and sums, `[parts, 3]` of those that are quantized, else `[parts]`."""

    def verdicts(self) -> dict[str, Verdict]:
        """Wait until everything is staged, and tell what became of each tensor."""
        table = torch.zeros(len(self.names), 4, dtype=torch.float64)
        for owners, sums in self.found:
            told = sums.cpu()
            if told.ndim == 2:
                table[:, :3].index_add_(0, owners, told.nan_to_num(0.0, 0.0, 0.0))
            else:
                table[:, 2].index_add_(0, owners, told)
        return {name: verdict(*row) for name, row in zip(self.names, table.tolist(), strict=True)}


class AtOnce:
    """Of one rank's stager, whose targets stay where they are."""

    def __init__(self, stager: Stager) -> None:
        self._stager = stager
        self._parts: dict[TensorSpec, list[_Part] | None] = {}
        self._known: OrderedDict[tuple[tuple[str, ...], tuple[str, ...]], Chores] = OrderedDict()

    def learn(self, specs: Iterable[TensorSpec]) -> None:
        """Look at these tensors before they come."""
        for spec in specs:
            self._parts_of(spec)

    def stage(self, placed: Placed, leave: Collection[str], pace: Pace) -> tuple[Queued, Placed]:
        """Queue the staging of these tensors, at this pace. Returned are those of `leave`, and those that need to be looked
        at one by one: a part that is no whole blocks, another dtype than the served one, an odd address."""
        starts = torch.tensor([stored.start for stored in placed.tensors], dtype=torch.int64)
        addresses, tensors = placed.addresses(starts), placed.tensors
        kept = addresses % UNIT == 0
        if leave:
            kept &= torch.tensor([stored.spec.name not in leave for stored in tensors])
        if not kept.all():
            addresses = addresses[kept]
            tensors = [stored for stored, good in zip(tensors, kept.tolist(), strict=True) if good]
        chores = self._chores(tensors)
        did = None if pace.unlimited else pace.did
        found = [
            (errand.owners, errand.run.queue(addresses[errand.sources] + errand.offsets, did))
            for errand in chores.errands
        ]
        rest = placed.tensors
        if chores.names:
            done = set(chores.names)
            rest = [stored for stored in rest if stored.spec.name not in done]
        return Queued(chores.names, found), replace(placed, tensors=rest)

    def _chores(self, tensors: Sequence[StoredTensor]) -> Chores:
        key = tuple(stored.spec.name for stored in tensors), tuple(stored.spec.dtype for stored in tensors)
        if key not in self._known:
            self._known[key] = self._listed(tensors)
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]

    def _listed(self, tensors: Sequence[StoredTensor]) -> Chores:
        names: list[str] = []
        alike: dict[tuple[object, ...], list[_Part]] = defaultdict(list)
        for number, stored in enumerate(tensors):
            parts = self._parts_of(stored.spec)
            if parts is None:
                continue
            for part in parts:
                alike[part.kind].append(replace(part, source=number, owner=len(names)))
            names.append(stored.spec.name)
        return Chores(names, [_errand(parts) for parts in alike.values()])

    def _parts_of(self, spec: TensorSpec) -> list[_Part] | None:
        """None where a part can't go with others, or where there are none: block scales, which wait for their codes."""
        if spec not in self._parts:
            parts = [self._part(spec, piece) for piece in self._stager.pieces.get(spec.name, ())]
            known = [part for part in parts if part is not None]
            self._parts[spec] = known if known and len(known) == len(parts) else None
        return self._parts[spec]

    def _part(self, spec: TensorSpec, piece: Piece) -> _Part | None:
        """What becomes of a piece; None where it can't go with others."""
        shape, dtype = spec.shape, spec.torch_dtype
        starts = [start for start, _ in piece.source]
        offset = dtype.itemsize * sum(
            start * math.prod(shape[axis + 1 :]) for axis, start in enumerate(starts)
        )
        target = self._stager.quantized.get(piece.target)
        if offset % UNIT:
            return None
        if target is None:
            room = place(self._stager.plain[piece.target], piece)
            if dtype != room.dtype or shape[1:] != room.shape[1:] or not copy_together.takes(room):
                return None
            return _Part(dtype, offset, room)
        first, last = piece.origin[0], piece.origin[0] + piece.source[0][1] - piece.source[0][0]
        rows, columns = target.codes.shape
        whole = first % BLOCK == 0 and (last % BLOCK == 0 or last == rows)
        if dtype != target.dtype or not whole or piece.source[1][1] - starts[1] != columns:
            return None
        scales = target.scales[first // BLOCK : blocks(last)]
        to = Place(target.codes[first:last], scales, shape[1])
        if not to.takes(dtype):
            return None
        return _Part(dtype, offset, to, target.scale_format)


def _errand(parts: list[_Part]) -> Errand:
    """One launch for all of them."""
    sources, owners, offsets = (
        torch.tensor([getattr(part, name) for part in parts], dtype=torch.int64)
        for name in ("source", "owner", "offset")
    )
    scale_format = parts[0].scale_format
    run: CopyTogether | QuantizeTogether
    if scale_format is None:
        run = CopyTogether([part.to for part in parts if isinstance(part.to, Tensor)])
    else:
        places = [part.to for part in parts if isinstance(part.to, Place)]
        run = QuantizeTogether(places, parts[0].dtype, scale_format)
    return Errand(sources, owners, offsets, run)
