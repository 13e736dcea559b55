# SPDX-License-Identifier: Apache-2.0
"""Stages tensors that lie on the rank's GPU, all at once: the same ones come with every update, so what becomes of them is
listed once, and an update brings addresses alone. Little is left to do for each tensor, and little of Python's interpreter
is taken from the engine beside it.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm_fp8ext.kernels.numerics.reference import UNIT
from vllm_fp8ext.update.contract.manifest import CODES_DTYPE, TensorSpec, scale_name
from vllm_fp8ext.update.contract.safetensors_header import StoredTensor
from vllm_fp8ext.update.transports.memory import Placed
from vllm_fp8ext.update.worker.errands import Errand, Part, errand, part_of
from vllm_fp8ext.update.worker.rate_limiter import Pace
from vllm_fp8ext.update.worker.staging import Stager, Verdict, verdict

_KEPT = 4
"""Lists that are kept: of so many times as many tensors as a whole update brings; and of at least `_FEW` tensors."""
_FEW = 1024


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
    """Whose they are, int64 `[parts]`, and sums: `[parts, 3]` as of `QuantizeTogether`, `[parts, 2]` as of `CopyBlocks`, or
    `[parts, 1]` as of `CopyTogether`."""


_TOLD = {1: slice(2, 3), 2: slice(2, 4), 3: slice(0, 3)}
"""Which of error, norm, not finite and wrong scales so many columns of sums tell."""


class AtOnce:
    """Of one rank's stager, whose targets stay where they are."""

    def __init__(self, stager: Stager) -> None:
        self._stager = stager
        self._parts: dict[TensorSpec, list[Part] | None] = {}
        self._known: OrderedDict[tuple[int, ...], tuple[list[TensorSpec], Chores]] = OrderedDict()
        """By the identities of their specifications, which are kept: to compare thousands by their contents takes longer."""
        self._learnt: tuple[list[TensorSpec], Chores] = [], Chores([], [])

    def learn(self, specs: Sequence[TensorSpec], device: torch.device) -> None:
        """List what becomes of these tensors, which may come together in any order; and tell of nothing, which takes longer
        the first time."""
        listed = self._listed([StoredTensor(spec, 0, 0) for spec in specs])
        self._learnt = list(specs), listed
        told = [
            (torch.zeros(1, dtype=torch.int64), torch.zeros(1, columns, dtype=torch.float64, device=device))
            for columns in _TOLD
        ]
        self.verdicts([Queued([""], told)])

    def stage(self, placed: Placed, leave: Collection[str], pace: Pace) -> tuple[Queued, Placed]:
        """Queue the staging of these tensors, at this pace. Returned are those of `leave`, and those that need to be looked
        at one by one: a part that is no whole blocks, values of another dtype than the served one, an odd address."""
        starts = torch.tensor([stored.start for stored in placed.tensors], dtype=torch.int64)
        addresses, tensors = placed.memory.addresses(starts), placed.tensors
        kept = addresses % UNIT == 0
        if leave:
            kept &= torch.tensor([stored.spec.name not in leave for stored in tensors])
        if not kept.all():
            addresses = addresses[kept]
            tensors = [stored for stored, good in zip(tensors, kept.tolist(), strict=True) if good]
        chores = self._chores(tensors)
        did = None if pace.unlimited else pace.did
        queued = [
            (errand.owners, errand.run.queue(addresses[errand.sources] + errand.offsets, did))
            for errand in chores.errands
        ]
        found = [(owners, sums.view(len(owners), -1)) for owners, sums in queued]
        rest = placed.tensors
        done = frozenset(chores.names)
        if len(done) == len(rest):
            rest = []
        elif done:
            rest = [stored for stored in rest if stored.spec.name not in done]
        return Queued(chores.names, found), replace(placed, tensors=rest)

    @staticmethod
    def verdicts(queued: Sequence[Queued]) -> dict[str, Verdict]:
        """Wait until everything is staged, once, and tell what became of each tensor."""
        names: list[str] = []
        alike: dict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for part in queued:
            for owners, sums in part.found:
                alike[sums.shape[1]].append((owners + len(names), sums))
            names += part.names
        table = torch.zeros(len(names), 4, dtype=torch.float64)
        for columns, found in alike.items():
            sums = torch.cat([sums for _, sums in found]).cpu().nan_to_num(0.0, 0.0, 0.0)
            table[:, _TOLD[columns]].index_add_(0, torch.cat([owners for owners, _ in found]), sums)
        told: dict[str, Verdict] = dict(zip(names, zip(*table[:, :2].T.tolist(), strict=True), strict=True))
        for number in (table[:, 2] + table[:, 3]).nonzero()[:, 0].tolist():
            told[names[number]] = verdict(*table[number].tolist())
        return told

    def _chores(self, tensors: Sequence[StoredTensor]) -> Chores:
        specs = [stored.spec for stored in tensors]
        key = tuple(map(id, specs))
        if key not in self._known:
            self._known[key] = specs, self._reordered(tensors) or self._listed(tensors)
            most = max(_FEW, _KEPT * len(self._learnt[0]))
            while len(self._known) > 1 and sum(map(len, self._known)) > most:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key][1]

    def _reordered(self, tensors: Sequence[StoredTensor]) -> Chores | None:
        """What was learnt, if it was these."""
        specs, learnt = self._learnt
        numbers = {stored.spec: number for number, stored in enumerate(tensors)}
        if len(specs) != len(numbers) or not numbers.keys() >= set(specs):
            return None
        order = torch.tensor([numbers[spec] for spec in specs], dtype=torch.int64)
        return Chores(
            learnt.names, [replace(errand, sources=order[errand.sources]) for errand in learnt.errands]
        )

    def _listed(self, tensors: Sequence[StoredTensor]) -> Chores:
        names: list[str] = []
        alike: dict[tuple[object, ...], list[Part]] = defaultdict(list)
        numbers = {stored.spec.name: number for number, stored in enumerate(tensors)}
        for number, stored in enumerate(tensors):
            name, coded = stored.spec.name, stored.spec.dtype == CODES_DTYPE
            scales = [numbers.get(scale_name(name), -1)] if coded else []
            parts = self._parts_of(stored.spec)
            if parts is None or -1 in scales:
                continue
            for part in parts:
                alike[part.kind].append(replace(part, sources=(number, *scales), owner=len(names)))
            names += [name, *([scale_name(name)] if coded else [])]
        return Chores(names, [errand(parts) for parts in alike.values()])

    def _parts_of(self, spec: TensorSpec) -> list[Part] | None:
        """None where a part can't go with others, or where there are none: block scales come with their codes."""
        if spec not in self._parts:
            parts = [part_of(self._stager, spec, piece) for piece in self._stager.pieces.get(spec.name, ())]
            known = [part for part in parts if part is not None]
            self._parts[spec] = known if known and len(known) == len(parts) else None
        return self._parts[spec]
