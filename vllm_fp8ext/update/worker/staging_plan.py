# SPDX-License-Identifier: Apache-2.0
"""Plans for tensors that come together: which are staged by batched launches, and those launches.

The same tensors come with every update, so a plan is made once and an update brings addresses alone. Little is left to do for
each tensor, and little of Python's interpreter is taken from the engine beside it.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from vllm_fp8ext.update.contract.manifest import CODES_DTYPE, TensorSpec, scale_name
from vllm_fp8ext.update.contract.safetensors_header import StoredTensor
from vllm_fp8ext.update.worker.batched_ops import BatchedOp, BatchItem, batch_item, batched_ops, renumbered
from vllm_fp8ext.update.worker.staging_steps import Step

_KEPT_UPDATES = 4
"""Updates whose plans are kept, counted by the tensors of a whole one."""
_KEPT_TENSORS = 1024
"""Tensors, at least, whose plans are kept."""
KEPT_ITEMS = 1 << 16
"""Tensors and slices, at most, whose items are kept beside those of a whole update."""


@dataclass(frozen=True, slots=True)
class StagingPlan:
    """Launches that stage some of the tensors that come together: those with these names."""

    names: list[str]
    ops: list[BatchedOp]


class StagingPlans:
    """Plans of one rank, whose parameters stay where they are. `steps`: by the specification of a tensor, its steps."""

    def __init__(self, steps: Callable[[TensorSpec], Iterable[Step]]) -> None:
        self._steps = steps
        self._items: dict[TensorSpec, list[BatchItem] | None] = {}
        self._plans: OrderedDict[tuple[int, ...], tuple[list[TensorSpec], StagingPlan]] = OrderedDict()
        """Plans by the identities of specifications, which are kept: to compare their contents takes longer."""
        self._prepared: tuple[list[TensorSpec], StagingPlan] = [], StagingPlan([], [])

    def prepare(self, specs: Sequence[TensorSpec]) -> None:
        """Make a plan for these tensors, which may come together in any order."""
        self._prepared = list(specs), self._made([StoredTensor(spec, 0, 0) for spec in specs])

    def plan_of(self, tensors: Sequence[StoredTensor]) -> StagingPlan:
        """Return the plan for tensors that come in this order."""
        specs = [stored.spec for stored in tensors]
        key = tuple(map(id, specs))
        if key not in self._plans:
            self._plans[key] = specs, self._reordered(tensors) or self._made(tensors)
            most = max(_KEPT_TENSORS, _KEPT_UPDATES * len(self._prepared[0]))
            while len(self._plans) > 1 and sum(map(len, self._plans)) > most:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return self._plans[key][1]

    def _reordered(self, tensors: Sequence[StoredTensor]) -> StagingPlan | None:
        """Return the prepared plan, if it is of these tensors."""
        specs, prepared = self._prepared
        numbers = {stored.spec: number for number, stored in enumerate(tensors)}
        if len(specs) != len(numbers) or not numbers.keys() >= set(specs):
            return None
        order = torch.tensor([numbers[spec] for spec in specs], dtype=torch.int64)
        return StagingPlan(prepared.names, [renumbered(op, order) for op in prepared.ops])

    def _made(self, tensors: Sequence[StoredTensor]) -> StagingPlan:
        names: list[str] = []
        items: list[BatchItem] = []
        numbers = {stored.spec.name: number for number, stored in enumerate(tensors)}
        for number, stored in enumerate(tensors):
            name, coded = stored.spec.name, stored.spec.dtype == CODES_DTYPE
            scales = [numbers.get(scale_name(name), -1)] if coded else []
            parts = self._items_of(stored.spec)
            if parts is None or -1 in scales:
                continue
            items += [replace(part, sources=(number, *scales), owner=len(names)) for part in parts]
            names += [name, *([scale_name(name)] if coded else [])]
        return StagingPlan(names, batched_ops(items))

    def _items_of(self, spec: TensorSpec) -> list[BatchItem] | None:
        """Return the items of a tensor; None where a step has to run by itself, or where there are none.

        Block scales have none: they come with their codes.
        """
        if spec not in self._items:
            if len(self._items) > KEPT_ITEMS + len(self._prepared[0]):
                self._items.clear()
            items = [batch_item(spec, step) for step in self._steps(spec)]
            batched = [item for item in items if item is not None]
            self._items[spec] = batched if batched and len(batched) == len(items) else None
        return self._items[spec]
