# SPDX-License-Identifier: Apache-2.0
"""Joins the calls of several API server processes that commit the same update: one attempt, whose outcome each is told."""

from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_fp8ext.errors import UpdateError, errors_as_results
from vllm_fp8ext.update.contract.results import JobStarted, Result, Waiting
from vllm_fp8ext.update.engine.jobs import Jobs

KEPT_OUTCOMES = 64
"""Outcomes kept for callers that have not come for them."""


@dataclass
class _Attempt:
    """`callers`: those who are told its outcome. `job`: what it goes on in, if it does. `latest`: the caller that began that,
    who has its result by polling."""

    callers: set[str] = field(default_factory=set)
    job: int | None = None
    latest: str = ""


class CommitCalls:
    """The attempts of one engine. `commit(id)` begins one, or goes on with one that waits; `wait` makes the answer to a call
    that is to come again. `silent_seconds`: longest time in which ranks may do nothing for one."""

    def __init__(
        self,
        jobs: Jobs,
        commit: Callable[[str], Result],
        wait: Callable[[], Waiting],
        silent_seconds: float,
    ) -> None:
        self._jobs = jobs
        self._commit = errors_as_results(commit)
        self._wait = wait
        self._silent_seconds = silent_seconds
        self._attempts: dict[str, _Attempt] = {}
        self._outcomes: dict[tuple[str, str], Result] = {}

    def call(self, id: str, caller: str) -> Result:
        """Begin to commit an update, or join the attempt under way. A `caller` comes again until it has an outcome.

        Without that, the one that comes second would begin an attempt of its own when the first has failed.

        Raises:
            UpdateError: `engine-timeout`: the ranks do nothing any more for another caller's attempt.
        """
        if (id, caller) in self._outcomes:
            return self._outcomes.pop((id, caller))
        attempt = self._attempts.setdefault(id, _Attempt())
        attempt.callers.add(caller)
        if attempt.job is not None:
            self._jobs.reap()
        if (id, caller) in self._outcomes:  # it has just ended
            return self._outcomes.pop((id, caller))
        if attempt.job is not None:
            if self._jobs.silence(attempt.job) > self._silent_seconds:
                message = f"commit: nothing was done for {self._silent_seconds:g} s"
                raise UpdateError("engine-timeout", message, status=504)
            return self._wait()
        attempt.latest = caller
        result = self._commit(id)
        if isinstance(result, JobStarted):
            attempt.job = result.job
            self._jobs.call_at_end(result.job, lambda ended: self._take(id, attempt, ended))
        else:
            self._take(id, attempt, result)
        return result

    def _take(self, id: str, attempt: _Attempt, result: Result) -> None:
        attempt.job = None
        if isinstance(result, Waiting):
            return
        self._attempts.pop(id, None)
        self._outcomes |= {(id, caller): result for caller in attempt.callers - {attempt.latest}}
        for old in list(self._outcomes)[:-KEPT_OUTCOMES]:
            del self._outcomes[old]
