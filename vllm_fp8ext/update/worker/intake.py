# SPDX-License-Identifier: Apache-2.0
"""Takes in the tensors of an update on one rank: reads, checks and stages them into the shadow."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch

from vllm_fp8ext.errors import Failure, UpdateError
from vllm_fp8ext.update.contract.rank_results import Accepted, StagedTensors
from vllm_fp8ext.update.contract.safetensors_header import StoredTensor
from vllm_fp8ext.update.transports.memory import Memory, ResidentTensors
from vllm_fp8ext.update.transports.read_ahead import TensorRows
from vllm_fp8ext.update.transports.receiver import Receivers
from vllm_fp8ext.update.transports.transport import Source
from vllm_fp8ext.update.worker.checksums import Checksums
from vllm_fp8ext.update.worker.chunk_intake import ChunkIntake
from vllm_fp8ext.update.worker.rate_limiter import RateLimiter
from vllm_fp8ext.update.worker.shadow import Shadow
from vllm_fp8ext.update.worker.tied_tensors import TiedTensors
from vllm_fp8ext.update.worker.verdicts import ScaleError, TiedError, Verdict

Open: TypeAlias = Callable[
    [Sequence[StoredTensor], Collection[str], Callable[[], None]],
    AbstractContextManager[Iterable[ResidentTensors | TensorRows]],
]
"""Opens the tensors of a chunk, as `Receiver.open` does those of a source."""


class Intake:
    """Works on the staging thread, one chunk after the other; other threads may call `want` and `drop`."""

    def __init__(self, shadow: Shadow, rank: int, world_size: int, device: torch.device) -> None:
        self.progress: dict[int, int] = {}
        """Tensors that are staged, by job."""
        self._shadow = shadow
        self._rank = rank
        self._world_size = world_size
        self._device = device
        self._receivers = Receivers(rank, device)
        self._tied = TiedTensors(shadow.stager.tied)
        self._wanted = ""
        """The update whose tensors are wanted: chunks that an older one left in the queue are dropped."""
        self._staged = ""
        """The update that the shadow's contents belong to."""

    def warm_up(self) -> None:
        """Stage throw-away tensors, and plan the staging of an update's."""
        stager, known = self._shadow.stager, self._shadow.manifest.tensors
        stager.warm_up()
        self._receivers.warm_up()
        if self._device.type == "cuda":
            stager.prepare_batches([known[name] for name in known if name in stager.pieces], self._device)

    def want(self, session: str) -> None:
        """Want this update's tensors from now on, and no other's."""
        self._wanted = session

    def drop(self, session: str) -> None:
        """Want this update's tensors no more."""
        if self._wanted == session:
            self._wanted = ""

    def close_deferred(self) -> None:
        """Close what a chunk has left open."""
        self._receivers.close_deferred()

    def close_shared(self) -> None:
        """Close what chunks of one update share. Other threads may call it between chunks."""
        self._receivers.close_shared()

    def copy_unsent(self, session: str, names: list[str]) -> Accepted:
        """Copy served weights into the shadow wherever no tensor of these writes."""
        self._require_wanted(session)
        if self._staged != session:
            raise UpdateError("wrong-state", "a newer update was begun")
        self._shadow.copy_unsent(names)
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
        sparse: bool = False,
    ) -> StagedTensors | Failure:
        """Stage these tensors, or return the error that stopped the reading before anything was written.

        `hashes`: by the name of what was sent, the SHA-256 that its raw bytes must have, and which of these tensors it is;
        each rank checks its share. `rate`: bytes a second at most of what is staged together on the GPU; 0: any. `tied`:
        tensors in other chunks whose place others share. `sparse`: what the update does not bring stays, within tensors too.

        Raises:
            UpdateError: `wrong-state`, when the update is wanted no more; or what stops the reading later.
        """
        checksums = Checksums(dict(list(hashes.items())[self._rank :: self._world_size]))
        return self._stage(
            job, session, partial(self._receivers.open, source), tensors, checksums, rate, tied, sparse=sparse
        )

    def stage_held(
        self,
        job: int,
        session: str,
        memory: Memory,
        tensors: list[StoredTensor],
        tied: Sequence[str],
    ) -> StagedTensors | Failure:
        """Stage tensors that this process holds (`stage`)."""

        def held(
            tensors: Sequence[StoredTensor], as_rows: Collection[str], require_wanted: Callable[[], None]
        ) -> AbstractContextManager[Iterable[ResidentTensors | TensorRows]]:
            return nullcontext(self._receivers.resident(tensors, memory))

        return self._stage(job, session, held, tensors, Checksums({}), 0.0, tied)

    def begin_again(self) -> None:
        """Forget which update the shadow's contents belong to: the next tensors begin one."""
        self._staged = ""

    def _stage(
        self,
        job: int,
        session: str,
        opened: Open,
        tensors: list[StoredTensor],
        checksums: Checksums,
        rate: float,
        tied: Sequence[str],
        *,
        sparse: bool = False,
    ) -> StagedTensors | Failure:
        if self._staged != session:
            self._shadow.stager.reset()
            self._tied.reset()
            if sparse:
                self._shadow.copy_served()
            self._staged = session
        compared = self._tied.begin([stored.spec.name for stored in tensors], tied)
        chunk = ChunkIntake(self._shadow.stager, checksums, tensors, self._device, self._tied, compared)
        require_wanted = partial(self._require_wanted, session)
        limiter, began = RateLimiter(rate, require_wanted), False
        try:
            with opened(chunk.ordered(), chunk.as_rows, require_wanted) as parts:
                for part in parts:
                    require_wanted()
                    began = True
                    for rows in chunk.stage(part, limiter):
                        require_wanted()
                        chunk.stage_rows(rows)
                        self.progress[job] = chunk.staged
                    self.progress[job] = chunk.staged
                verdicts = chunk.table.verdicts()
        except BaseException as error:
            self._tied.end(())
            if began or not isinstance(error, UpdateError):
                raise
            return Failure.of(error, unchanged=True)
        self._tied.end([name for name, verdict in verdicts.items() if isinstance(verdict, tuple)])
        return self._result(chunk.problems, verdicts)

    def _require_wanted(self, session: str) -> None:
        if self._wanted != session:
            raise UpdateError("wrong-state", "the update was given up, or a newer one begun")

    def _result(self, problems: list[dict[str, Any]], verdicts: Mapping[str, Verdict]) -> StagedTensors:
        problems = list(problems)
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
        return StagedTensors(problems=problems, errors=errors)
