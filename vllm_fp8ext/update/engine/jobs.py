# SPDX-License-Identifier: Apache-2.0
"""Work of several calls to the ranks, each of which takes long: started by one call, advanced by polls.

A job is a generator that yields `OnRanks` steps and is sent the results of all ranks. What it returns is its result.
"""

import itertools
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from vllm_fp8ext.errors import Failure, UpdateError, errors_as_results
from vllm_fp8ext.update.contract.operations import RankMethod
from vllm_fp8ext.update.contract.rank_results import RankProgress, RankResult, failures
from vllm_fp8ext.update.contract.results import JobStarted, Progress, Result

Ranks = Callable[..., list[RankResult]]
"""`ranks(method, *arguments)`: one result of each rank."""

KEPT_RESULTS = 64


class OnRanks:
    """Step: start a `Rank` method on every rank and wait for its end. Results in what each rank has then."""

    def __init__(self, method: RankMethod, *arguments: Any) -> None:
        self.method = method
        self.arguments = arguments


T = TypeVar("T")
Flow: TypeAlias = Generator[OnRanks, list[RankResult], T]
"""Work that consists of steps; sent all ranks' results of each."""


@dataclass
class _Job:
    """`outcomes`: the final result of each rank that has one. `since`: when the ranks last said that more `tensors` were
    done. `ended`: told its result."""

    flow: Flow[Result]
    step: int = 0
    serial: int = 0
    """Number under which the ranks know the step."""
    outcomes: list[RankResult | None] = field(default_factory=list)
    since: float = 0.0
    tensors: int = 0
    ended: Callable[[Result], object] = lambda result: None


class Jobs:
    """The jobs of one engine. A job's result is told once. `patience`: seconds that a poll may wait on the ranks for the end
    of a job, asked at each: an engine without requests has time, and is asked again at once. `end`: ends the engine."""

    def __init__(
        self,
        ranks: Ranks,
        patience: Callable[[], float] = lambda: 0.0,
        end: Callable[[str], object] = lambda reason: None,
    ) -> None:
        self._ranks = ranks
        self._patience = patience
        self._end = end
        self._serials = itertools.count(1)
        self._jobs: dict[int, _Job] = {}
        self._done: dict[int, Result] = {}

    def start(self, flow: Flow[Result]) -> Result:
        """Begin a flow; returns its result where no step of it takes long.

        Raises:
            UpdateError: the flow's, before the ranks have begun anything.
        """
        job = _Job(flow)
        result = self._resume(job, None)
        if result is not None:
            return result
        self._jobs[job.serial] = job
        return JobStarted(job=job.serial)

    def call_at_end(self, job: int, call: Callable[[Result], object]) -> None:
        """Call this with the result of a running job when it ends."""
        self._jobs[job].ended = call

    def silence(self, job: int) -> float:
        """Return the seconds for which no rank has done anything for a job under way."""
        return time.monotonic() - self._jobs[job].since

    def poll(self, job: int) -> Result:
        """Return the result of a job that has ended, else `Progress`. Steps that end at once are gone through."""
        if job in self._done:
            return self._done.pop(job)
        if job not in self._jobs:
            raise UpdateError("unknown-job", f"no job {job}", status=404)
        step, result = self._jobs[job].step, self._advance(job, self._patience())
        while isinstance(result, Progress) and result.step != step:
            step, result = result.step, self._advance(job)
        return result

    def reap(self) -> None:
        """Take in finished jobs whose caller may have stopped to poll."""
        for serial in list(self._jobs):
            if serial not in self._jobs:  # what another one ended in has taken it in
                continue
            result = self._advance(serial)
            if not isinstance(result, Progress):
                self._done[serial] = result
        for serial in list(self._done)[:-KEPT_RESULTS]:
            del self._done[serial]

    def settle(self) -> None:
        """Wait until no rank works on a job any more."""
        self.reap()
        while self._jobs:
            time.sleep(0.001)
            self.reap()

    def _resume(self, job: _Job, results: list[RankResult] | None) -> Result | None:
        """Let a flow go on to its next step, and begin that; returns its result where it ends.

        A step that a rank could not begin is over on all: ranks that meet in collectives must not go on without it.
        """
        while True:
            try:
                step = next(job.flow) if results is None else job.flow.send(results)
            except StopIteration as stop:
                result: Result = stop.value
                return result
            serial = next(self._serials)
            results = self._ranks(step.method, serial, *step.arguments)
            if not failures(results):
                job.serial, job.step = serial, job.step + 1
                job.outcomes, job.tensors, job.since = [None] * len(results), 0, time.monotonic()
                return None

    def _advance(self, number: int, patience: float = 0.0) -> Result:
        job = self._jobs[number]
        again = self._poll_ranks(job, patience)
        outcomes = [outcome for outcome in job.outcomes if outcome is not None]
        if len(outcomes) < len(job.outcomes):
            return Progress(step=job.step, tensors=job.tensors, again=again or patience > 0)
        del self._jobs[number]  # a flow that is going on may reap
        result = errors_as_results(self._resume)(job, outcomes)
        if result is not None:
            job.ended(result)
            return result
        self._jobs[number] = job
        return Progress(step=job.step)

    def _poll_ranks(self, job: _Job, patience: float) -> bool:
        """Take in what the ranks have done; returns whether polls make the step go on."""
        results = self._ranks(RankMethod.POLL, job.serial, patience)
        for rank, result in enumerate(results):
            if job.outcomes[rank] is None and not isinstance(result, RankProgress):
                job.outcomes[rank] = result
        under_way = [result for result in results if isinstance(result, RankProgress)]
        again = any(result.again for result in under_way)
        self._require_together(job, job.outcomes if again else ())
        tensors = max((result.tensors for result in under_way), default=0)
        if tensors != job.tensors:
            job.tensors, job.since = tensors, time.monotonic()
        return again

    def _require_together(self, job: _Job, outcomes: Sequence[RankResult | None]) -> None:
        """End the engine where a rank has left collectives that the others have met in: they meet the next step's then."""
        failed = [outcome.message for outcome in outcomes if isinstance(outcome, Failure)]
        if failed:
            self._end(
                f"job {job.serial} failed on some ranks in the middle of the others' collectives: {failed[0]}"
            )
