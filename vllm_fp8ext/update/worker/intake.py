# SPDX-License-Identifier: Apache-2.0
"""Takes in the tensors of an update on one rank: reads them from their source, checks them, and stages them into the twin."""

from collections.abc import Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from vllm_fp8ext.errors import Failure, UpdateError
from vllm_fp8ext.update.contract.manifest import CODES_DTYPE, SCALES, scale_name
from vllm_fp8ext.update.contract.rank_results import Accepted, StagedTensors
from vllm_fp8ext.update.contract.safetensors_header import StoredTensor
from vllm_fp8ext.update.transports.memory import ResidentTensors
from vllm_fp8ext.update.transports.read_ahead import TensorRows
from vllm_fp8ext.update.transports.receiver import Receivers
from vllm_fp8ext.update.transports.transport import Source
from vllm_fp8ext.update.worker.checksums import Checksums
from vllm_fp8ext.update.worker.rate_limiter import RateLimiter
from vllm_fp8ext.update.worker.shadow import Shadow
from vllm_fp8ext.update.worker.stager import Stager
from vllm_fp8ext.update.worker.staging_steps import StagingInput
from vllm_fp8ext.update.worker.tied_tensors import TiedTensors
from vllm_fp8ext.update.worker.verdicts import ScaleError, TiedError, Verdict, VerdictTable


class _Chunk:
    """What came of a chunk's tensors, one by one: `done` of them, and `problems`."""

    def __init__(
        self,
        stager: Stager,
        checksums: Checksums,
        tensors: Iterable[StoredTensor],
        device: torch.device,
        places: TiedTensors,
        alone: frozenset[str],
    ) -> None:
        self.done = 0
        self._places = places
        self._alone = alone
        self.problems: list[dict[str, Any]] = []
        self._stager = stager
        self._checksums = checksums
        self._device = device
        self._codes = {stored.spec.name for stored in tensors if stored.spec.dtype == CODES_DTYPE}
        self.scale_names = set(map(scale_name, self._codes))
        self._scales: dict[str, Tensor] = {}
        self.table = VerdictTable()

    @property
    def apart(self) -> set[str]:
        """Names of tensors that come by themselves: hashed on the host, compared, codes, and what these need."""
        return {*self._checksums.parts, *self._alone, *self._codes, *self.scale_names}

    def ordered(self, tensors: Iterable[StoredTensor]) -> list[StoredTensor]:
        """Those that this rank has to do with, not other ranks' experts, as they lie: codes after all scales, which are
        small, and nothing that comes by itself between what goes together."""
        here = self._stager.pieces.keys() | self._checksums.parts
        found = [
            stored
            for stored in tensors
            if (name := stored.spec.name) in here or name.removesuffix(SCALES) in here
        ]
        found.sort(key=attrgetter("start"))
        apart, first = self.apart, self.scale_names
        if apart:
            found.sort(key=lambda stored: (stored.spec.name not in first, stored.spec.name in apart))
        return found

    def take(self, rows: TensorRows) -> None:
        """Queue the staging of the next rows."""
        spec, first = rows.stored.spec, rows.first
        name = spec.name
        problem = self._checksums.problem(rows)
        if problem:
            self.problems.append(problem)
        self.done += rows.last
        if name in self.scale_names:
            if name not in self._scales:
                self._scales[name] = torch.empty(spec.shape, dtype=torch.float32, device=self._device)
            self._scales[name][first : first + len(rows.values)].copy_(rows.values, non_blocking=True)
            return
        scales = self._scales[scale_name(name)] if name in self._codes else None
        part = StagingInput(name, rows.values, first, scales)
        if self._places.compares(name):
            self._stager.compare(part, self.table)
        else:
            self._stager.stage(part, self.table)


class Intake:
    """Works on the staging thread, one chunk after the other; `want` and `drop` are for others. `progress`: by job, how many
    tensors are in."""

    def __init__(self, twin: Shadow, rank: int, world_size: int, device: torch.device) -> None:
        self.progress: dict[int, int] = {}
        self._twin = twin
        self._rank = rank
        self._world_size = world_size
        self._device = device
        self._receivers = Receivers(rank, device)
        self._places = TiedTensors(twin.stager.tied)
        self._wanted = ""
        """The update whose tensors are wanted: what an older one left in the queue is dropped."""
        self._staged = ""
        """The update that the twin's contents belong to."""

    def rehearse(self) -> None:
        """Stage something that is thrown away, and look at what an update brings."""
        stager, known = self._twin.stager, self._twin.manifest.tensors
        stager.rehearse()
        self._receivers.warm_up()
        if self._device.type == "cuda":
            stager.prepare_batches([known[name] for name in known if name in stager.pieces], self._device)

    def want(self, session: str) -> None:
        """From now on this update's tensors are wanted, and no other's."""
        self._wanted = session

    def drop(self, session: str) -> None:
        """This update's tensors are wanted no more."""
        if self._wanted == session:
            self._wanted = ""

    def tidy(self) -> None:
        """Close what a chunk has left open."""
        self._receivers.close_deferred()

    def keep_others(self, session: str, names: list[str]) -> Accepted:
        """Give the twin the served weights wherever these tensors of an update lie not."""
        self._require_wanted(session)
        if self._staged != session:
            raise UpdateError("wrong-state", "a newer update was begun")
        self._twin.keep_others(names)
        return Accepted()

    def stage(
        self,
        job: int,
        session: str,
        source: Source,
        tensors: list[StoredTensor],
        hashes: dict[str, Any],
        rate: float = 0.0,
        tied: Sequence[str] = (),
    ) -> StagedTensors | Failure:
        """Stage these tensors; `problems` of some, and squared error and squared norm of those that were quantized; or the
        `error` that stopped the reading before anything was written.

        `hashes`: by the name of what was sent, the SHA-256 that its raw bytes must have, and which of these tensors it is;
        each rank checks its share. `rate`: bytes a second at most of what is staged together on the GPU; 0: any. `tied`:
        tensors in other chunks whose place others share.

        Raises:
            UpdateError: `wrong-state`, when the update is wanted no more; or what stops the reading later.
        """
        if self._staged != session:
            self._twin.stager.reset()
            self._places.reset()
            self._staged = session
        checksums = Checksums(dict(list(hashes.items())[self._rank :: self._world_size]))
        alone = self._places.begin([stored.spec.name for stored in tensors], tied)
        chunk = _Chunk(self._twin.stager, checksums, tensors, self._device, self._places, alone)
        checked = alone.union(checksums.parts)
        wanted = partial(self._require_wanted, session)
        limiter, came = RateLimiter(rate, wanted), False
        try:
            with self._receivers.open(source, chunk.ordered(tensors), chunk.apart, wanted) as parts:
                for part in parts:
                    wanted()
                    came = True
                    rest: Iterable[TensorRows]
                    if isinstance(part, ResidentTensors):
                        rest = self._twin.stager.stage_batch(part, checked, limiter, chunk.table)
                        chunk.done += len(part.tensors) - len(rest.tensors)
                    else:
                        rest = (part,)
                    for rows in rest:
                        wanted()
                        chunk.take(rows)
                        self.progress[job] = chunk.done
                    self.progress[job] = chunk.done
                told = chunk.table.verdicts()
        except BaseException as error:
            self._places.end(())
            if came or not isinstance(error, UpdateError):
                raise
            return Failure.of(error, unchanged=True)
        self._places.end([name for name, verdict in told.items() if isinstance(verdict, tuple)])
        wrong, errors = self._told(told)
        return StagedTensors(problems=chunk.problems + wrong, errors=errors)

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
            if isinstance(verdict, tuple):
                if verdict[1]:
                    errors[name] = verdict
                continue
            problem = {"kind": "non-finite", "tensor": name, "rank": self._rank}
            if isinstance(verdict, ScaleError):
                problem |= {"kind": "wrong-scales", "detail": str(verdict)}
            if isinstance(verdict, TiedError):
                problem |= {"kind": "tied-differs", "detail": str(verdict)}
            problems.append(problem)
        return problems, errors
