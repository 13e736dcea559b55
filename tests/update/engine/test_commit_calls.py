# SPDX-License-Identifier: Apache-2.0
"""Commits of one update by several API server processes, against ranks that answer from a script."""

from typing import Any

import pytest

from vllm_fp8ext.errors import Failure, UpdateError
from vllm_fp8ext.update.contract.operations import RankMethod
from vllm_fp8ext.update.contract.rank_results import Accepted, RankProgress, RankResult
from vllm_fp8ext.update.contract.results import Done, JobStarted, Progress, Result, Waiting
from vllm_fp8ext.update.engine import jobs as jobs_module
from vllm_fp8ext.update.engine.commit_calls import CommitCalls
from vllm_fp8ext.update.engine.jobs import Flow, Jobs, OnRanks

WAITING, DONE = Waiting(requests=2), Done()
REFUSED = UpdateError("wait-timeout", "still running")


class Engine:
    """`script`: what commits come to in turn: a result, an error, or "job", which ends with what comes next."""

    def __init__(self, *script: Any) -> None:
        self.script = list(script)
        self.commits = 0
        self.ranks_are_done = False
        self.jobs = Jobs(self._ranks)
        self.calls = CommitCalls(self.jobs, self._commit, lambda: WAITING, 10.0)

    def _ranks(self, method: str, *arguments: Any) -> list[RankResult]:
        return [Accepted() if method != RankMethod.POLL or self.ranks_are_done else RankProgress(tensors=0)]

    def _commit(self, id: str) -> Result:
        self.commits += 1
        if self.script[0] == "job":
            return self.jobs.start(self._job())
        return self._next()

    def _job(self) -> Flow[Result]:
        while self.script[0] == "job":
            del self.script[0]
            self.ranks_are_done = False
            yield OnRanks(RankMethod.RUN_CANARY)
        return self._next()

    def _next(self) -> Result:
        result: Any = self.script.pop(0)
        if isinstance(result, UpdateError):
            raise result
        return result

    def poll(self, started: Result) -> Result:
        assert isinstance(started, JobStarted)
        return self.jobs.poll(started.job)


def as_result(last: Any) -> Result:
    result: Result = Failure.of(last) if isinstance(last, UpdateError) else last
    return result


def test_what_ends_at_once_is_the_callers_own() -> None:
    engine = Engine(DONE, DONE)
    assert [engine.calls.call("u", caller) for caller in "ab"] == [DONE, DONE]
    assert engine.commits == 2


@pytest.mark.parametrize("last", [DONE, REFUSED])
def test_callers_of_an_attempt_that_waits_get_its_outcome(last: Any) -> None:
    """The second one begins no attempt of its own when the first has ended."""
    engine = Engine(WAITING, WAITING, last, DONE)
    assert engine.calls.call("u", "a") == WAITING
    assert engine.calls.call("u", "b") == WAITING
    assert engine.calls.call("u", "b") == as_result(last)
    assert engine.calls.call("u", "a") == as_result(last)
    assert engine.commits == 3
    assert engine.calls.call("u", "a") == DONE  # another commit
    assert engine.commits == 4


@pytest.mark.parametrize("last", [DONE, REFUSED])
def test_callers_of_an_attempt_that_goes_on_in_a_job_get_its_outcome(last: Any) -> None:
    engine = Engine("job", "job", last)
    started = engine.calls.call("u", "a")
    assert engine.calls.call("u", "b") == WAITING
    engine.ranks_are_done = True
    assert isinstance(engine.poll(started), Progress)
    assert engine.calls.call("u", "b") == WAITING
    engine.ranks_are_done = True
    assert engine.poll(started) == as_result(last)
    assert engine.calls.call("u", "b") == as_result(last)
    assert engine.commits == 1


def test_a_job_whose_caller_went_away_ends_all_the_same() -> None:
    engine = Engine("job", DONE)
    engine.calls.call("u", "a")
    assert engine.calls.call("u", "b") == WAITING
    engine.ranks_are_done = True
    assert engine.calls.call("u", "b") == DONE


def test_a_job_that_ends_in_waiting_is_gone_on_with() -> None:
    engine = Engine("job", WAITING, DONE)
    started = engine.calls.call("u", "a")
    assert engine.calls.call("u", "b") == WAITING
    engine.ranks_are_done = True
    assert engine.poll(started) == WAITING
    assert engine.calls.call("u", "b") == DONE
    assert engine.calls.call("u", "a") == DONE
    assert engine.commits == 2


def test_nobody_waits_for_ranks_that_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine("job")
    engine.calls.call("u", "a")
    now = jobs_module.time.monotonic() + 11
    monkeypatch.setattr(jobs_module.time, "monotonic", lambda: now)
    with pytest.raises(UpdateError) as caught:
        engine.calls.call("u", "b")
    assert caught.value.kind == "engine-timeout"
