# SPDX-License-Identifier: Apache-2.0
"""Work under way on all ranks: started by one call, advanced and asked about by polling."""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_fp8ext.errors import UpdateError, described
from vllm_fp8ext.update.contract.operations import RankMethod
from vllm_fp8ext.update.contract.rank_results import Result as Result

Ranks = Callable[..., list[Result]]
"""`ranks(method, *arguments)`: one result of each rank."""

KEPT_RESULTS = 64


@dataclass
class Job:
    """`outcomes`: the final result of each rank that has one. `since`: when the ranks last said that more `tensors` were
    done."""

    outcomes: list[Result | None]
    finish: Callable[[list[Result]], Result]
    since: float
    tensors: int = 0


class Jobs:
    """The jobs of one engine. A job's result is told once. `patience`: seconds that a poll may wait on the ranks for the end
    of a job, asked at each: an engine without requests has time, and is asked again at once. `end`: of the engine."""

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
        self._jobs: dict[int, Job] = {}
        self._done: dict[int, Result] = {}

    def start(self, method: RankMethod, *arguments: Any, finish: Callable[[list[Result]], Result]) -> Result:
        """Start a `Rank` method on every rank; `finish` makes the job's result of theirs.

        When a rank could not start, the job is over on all: ranks that meet in collectives must not go on without it.
        """
        serial = next(self._serials)
        started = self._ranks(method, serial, *arguments)
        if any("error" in result for result in started):
            return described(finish)(started)
        self._jobs[serial] = Job([None] * len(started), finish, time.monotonic())
        return {"job": serial}

    def followed(self, started: Result, then: Callable[[], Result]) -> Result:
        """What `start` returned. Once its job, and those that it goes on in, have ended well, `then` makes the result."""
        if "error" in started:
            return started
        if "job" not in started:
            return then()
        job = self._jobs[started["job"]]
        finish = job.finish
        job.finish = lambda results: self.followed(finish(results), then)
        return started

    def watched(self, started: Result, moved: Callable[[int | None], None]) -> Result:
        """What `start` returned. `moved` is called with its job, with each that it goes on in, and, when they have ended,
        well or not, with None."""
        moved(started.get("job"))
        if "job" in started:
            job = self._jobs[started["job"]]
            finish = described(job.finish)
            job.finish = lambda results: self.watched(finish(results), moved)
        return started

    def silence(self, job: int) -> float:
        """For how many seconds no rank has done anything for a job that has not ended."""
        return time.monotonic() - self._jobs[job].since

    def poll(self, job: int) -> Result:
        """Progress of a job: `{"done": False, …}`, or `done` with its result, once every rank has one. A result may be
        another job, in which this one goes on, and which has not ended yet."""
        if job in self._done:
            return self._done.pop(job)
        if job not in self._jobs:
            raise UpdateError("unknown-job", f"no job {job}", status=404)
        result = self._advance(job, self._patience())
        while "job" in result:
            further = self._advance(result["job"])
            if not further["done"]:
                break
            result = further
        return result

    def reap(self) -> None:
        """Take in finished jobs whose caller may have stopped to poll."""
        for serial in list(self._jobs):
            if serial not in self._jobs:  # what another one ended in has taken it in
                continue
            result = self._advance(serial)
            if result["done"]:
                self._done[serial] = result
        for serial in list(self._done)[:-KEPT_RESULTS]:
            del self._done[serial]

    def settle(self) -> None:
        """Wait until no rank works on a job any more."""
        self.reap()
        while self._jobs:
            time.sleep(0.001)
            self.reap()

    def _advance(self, serial: int, patience: float = 0.0) -> Result:
        job = self._jobs[serial]
        tensors, alike = 0, False
        for rank, result in enumerate(self._ranks(RankMethod.POLL, serial, patience)):
            if job.outcomes[rank] is None and (result.get("done") or "error" in result):
                job.outcomes[rank] = result
            tensors = max(tensors, result.get("tensors", 0))
            alike = alike or result.get("again", False)
        failed = [outcome["error"]["message"] for outcome in job.outcomes if outcome and "error" in outcome]
        if alike and failed:
            # the others have met in collectives that it has left, and will meet the next step's instead
            self._end(
                f"job {serial} failed on some ranks in the middle of the others' collectives: {failed[0]}"
            )
        again = alike or patience > 0
        if tensors != job.tensors:
            job.tensors, job.since = tensors, time.monotonic()
        finished = [outcome for outcome in job.outcomes if outcome is not None]
        if len(finished) < len(job.outcomes):
            return {"done": False, "tensors": tensors, "again": again}
        del self._jobs[serial]
        return {"done": True, **described(job.finish)(finished)}
