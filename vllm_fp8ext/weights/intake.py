# SPDX-License-Identifier: Apache-2.0
"""Takes in the tensors of an update on one rank: reads them from their source, checks them, and stages them into the twin."""

from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.kernels.reference import NonFiniteError
from vllm_fp8ext.weights.checksums import Checksums
from vllm_fp8ext.weights.lanes import Result
from vllm_fp8ext.weights.manifest import CODES_DTYPE, SCALES, scale_name
from vllm_fp8ext.weights.pace import Pace
from vllm_fp8ext.weights.safetensors_header import StoredTensor
from vllm_fp8ext.weights.source import AnySource, Placed, Sources
from vllm_fp8ext.weights.staging import Outcome, ScaleError, Verdict, verdicts
from vllm_fp8ext.weights.twin import Twin

if TYPE_CHECKING:
    from vllm_fp8ext.weights.at_once import AtOnce


class Intake:
    """Works on the staging thread, one chunk after the other; `want` and `drop` are for others. `progress`: by job, how many
    tensors are in."""

    def __init__(self, twin: Twin, rank: int, world_size: int, device: torch.device) -> None:
        self.progress: dict[int, int] = {}
        self._twin = twin
        self._rank = rank
        self._world_size = world_size
        self._device = device
        self._sources = Sources(rank, device)
        self._wanted = ""
        """The update whose tensors are wanted: what an older one left in the queue is dropped."""
        self._staged = ""
        """The update that the twin's contents belong to."""

    def rehearse(self) -> None:
        """Stage something that is thrown away, and look at what an update brings."""
        self._twin.stager.rehearse()
        if self._device.type == "cuda":
            self._at_once.learn(self._twin.manifest.tensors.values())

    def want(self, session: str) -> None:
        """From now on this update's tensors are wanted, and no other's."""
        self._wanted = session

    def drop(self, session: str) -> None:
        """This update's tensors are wanted no more."""
        if self._wanted == session:
            self._wanted = ""

    def tidy(self) -> None:
        """Close what a chunk has left open."""
        self._sources.tidy()

    def keep_others(self, session: str, names: list[str]) -> Result:
        """Give the twin the served weights wherever these tensors of an update lie not."""
        self._require_wanted(session)
        if self._staged != session:
            raise UpdateError("wrong-state", "a newer update was begun")
        self._twin.keep_others(names)
        return {}

    def stage(
        self,
        job: int,
        session: str,
        source: AnySource,
        tensors: list[StoredTensor],
        hashes: dict[str, Any],
        rate: float = 0.0,
    ) -> Result:
        """Stage these tensors; `problems` of some, and squared error and squared norm of those that were quantized.

        `hashes`: by the name of what was sent, the SHA-256 that its raw bytes must have, and which of these tensors it is;
        each rank checks its share. `rate`: bytes a second at most of what lies on the GPU already; 0: any.

        Raises:
            UpdateError: `wrong-state`, when the update is wanted no more; or what stops the reading.
        """
        if self._staged != session:
            self._twin.stager.reset()
            self._staged = session
        problems: list[dict[str, Any]] = []
        outcomes: dict[str, Outcome] = {}
        codes = {stored.spec.name for stored in tensors if stored.spec.dtype == CODES_DTYPE}
        names = set(map(scale_name, codes))
        checksums = Checksums(dict(list(hashes.items())[self._rank :: self._world_size]))
        pieces, checked = self._twin.stager.pieces, checksums.parts
        here = [  # not other ranks' experts
            stored
            for stored in tensors
            if (name := stored.spec.name) in pieces or name.removesuffix(SCALES) in pieces or name in checked
        ]
        # codes come after all scales, which are small
        ordered = sorted(here, key=lambda stored: (stored.spec.name not in names, stored.start))
        stager, done, queued, left = self._twin.stager, 0, None, ordered
        wanted = partial(self._require_wanted, session)
        with self._sources.open(source, ordered, wanted) as parts:
            if isinstance(parts, Placed):
                wanted()
                queued, parts = self._at_once.stage(parts, checksums.parts, Pace(rate, wanted))
                self.progress[job] = done = len(queued.names)
                left = list(parts.tensors)
            scales = {
                stored.spec.name: torch.empty(stored.spec.shape, dtype=torch.float32, device=self._device)
                for stored in left
                if stored.spec.name in names
            }
            for rows in parts:
                wanted()
                name, first = rows.stored.spec.name, rows.first
                problem = checksums.problem(rows)
                if problem:
                    problems.append(problem)
                if name in scales:
                    place = scales[name][first : first + len(rows.values)]
                    place.copy_(rows.values, non_blocking=True)
                elif name in codes:
                    scale = scales[scale_name(name)]
                    outcome = stager.stage_codes(name, rows.values, scale, first)
                    outcomes.setdefault(name, Outcome()).add(outcome)
                else:
                    outcome = stager.stage(name, rows.values, first)
                    outcomes.setdefault(name, Outcome()).add(outcome)
                done += rows.last
                self.progress[job] = done
            found = dict(zip(outcomes, verdicts(list(outcomes.values())), strict=True))
            if queued is not None:
                found |= queued.verdicts()
            wrong, errors = self._told(found)
        return {"problems": problems + wrong, "errors": errors}

    @cached_property
    def _at_once(self) -> "AtOnce":
        from vllm_fp8ext.weights.at_once import AtOnce

        return AtOnce(self._twin.stager)

    def _require_wanted(self, session: str) -> None:
        if self._wanted != session:
            raise UpdateError("wrong-state", "the update was given up, or a newer one begun")

    def _told(
        self, verdicts: dict[str, Verdict]
    ) -> tuple[list[dict[str, Any]], dict[str, tuple[float, float]]]:
        """What was wrong, and squared error and squared norm by tensor."""
        problems: list[dict[str, Any]] = []
        errors: dict[str, tuple[float, float]] = {}
        for name, verdict in verdicts.items():
            if isinstance(verdict, NonFiniteError):
                problems.append({"kind": "non-finite", "tensor": name, "rank": self._rank})
            elif isinstance(verdict, ScaleError):
                problems.append(
                    {"kind": "wrong-scales", "tensor": name, "rank": self._rank, "detail": str(verdict)}
                )
            elif verdict[1]:
                errors[name] = verdict
        return problems, errors
