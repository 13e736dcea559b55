# SPDX-License-Identifier: Apache-2.0
"""Jobs against ranks that answer from a script."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_fp8ext.errors import Failure, UpdateError
from vllm_fp8ext.update.contract.operations import RankMethod
from vllm_fp8ext.update.contract.rank_results import Accepted, KvRescaled, RankProgress, RankResult, all_of
from vllm_fp8ext.update.contract.results import JobStarted, Progress, Result, Waiting
from vllm_fp8ext.update.engine import jobs as module
from vllm_fp8ext.update.engine.jobs import Flow, Jobs, OnRanks

ERROR = Failure(kind="out-of-memory", message="no room", status=507)
GOES_ON = RankProgress()
STAGE, CANARY, FINGERPRINT = RankMethod.STAGE, RankMethod.RUN_CANARY, RankMethod.FINGERPRINT


class Ranks:
    """`script`: for each rank its answers to `poll`, in order; then, as a rank whose job is over, that it goes on."""

    def __init__(self, *script: list[RankResult], started: list[RankResult] | None = None) -> None:
        self.script = [list(answers) for answers in script]
        self.started: list[RankResult] = started or [Accepted() for _ in script]
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, method: str, *arguments: Any) -> list[RankResult]:
        self.calls.append((method, *arguments))
        if method != "poll":
            return self.started
        return [answers.pop(0) if answers else GOES_ON for answers in self.script]


def done(value: int) -> RankResult:
    """A result, of any kind, with a number in it."""
    return KvRescaled(codes=value)


def summed(results: list[RankResult]) -> Waiting:
    """The sum of their numbers, as any kind of result."""
    return Waiting(requests=sum(result.codes for result in all_of(KvRescaled, results)))


def sum_of(value: int) -> Waiting:
    return Waiting(requests=value)


def flow(
    method: RankMethod = STAGE, *arguments: Any, finish: Callable[[list[RankResult]], Result] = summed
) -> Flow[Result]:
    """One step, and what `finish` makes of it."""
    return finish((yield OnRanks(method, *arguments)))


def test_a_job_is_started_on_every_rank_and_polled_to_its_end() -> None:
    ranks = Ranks([RankProgress(tensors=2), done(1)], [RankProgress(tensors=5), done(2)])
    jobs = Jobs(ranks)
    assert jobs.start(flow(STAGE, "u1", [])) == JobStarted(job=1)
    assert jobs.poll(1) == Progress(step=1, tensors=5, again=False)
    assert jobs.poll(1) == sum_of(3)
    assert ranks.calls == [("stage", 1, "u1", []), ("poll", 1, 0.0), ("poll", 1, 0.0)]


@pytest.mark.parametrize("slow", [0, 1])
def test_a_rank_that_is_done_waits_for_the_others(slow: int) -> None:
    """It goes on being asked, as every rank must be, and what it answers then is not its result."""
    script: list[list[RankResult]] = [[done(1)], [done(2)]]
    script[slow] = [RankProgress(tensors=1), RankProgress(tensors=2), *script[slow]]
    jobs = Jobs(Ranks(*script))
    jobs.start(flow())
    for _ in range(2):
        assert isinstance(jobs.poll(1), Progress)
    assert jobs.poll(1) == sum_of(3)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_while_it_runs_is_told_when_every_rank_is_done(rank: int) -> None:
    script: list[list[RankResult]] = [[GOES_ON, done(1)], [GOES_ON, done(2)]]
    script[rank] = [ERROR]
    jobs = Jobs(Ranks(*script))
    jobs.start(flow(CANARY))
    assert isinstance(jobs.poll(1), Progress)
    assert jobs.poll(1) == ERROR


def test_a_job_that_goes_on_in_polls_alone_says_so() -> None:
    jobs = Jobs(Ranks([GOES_ON, done(1)], [RankProgress(again=True), done(2)]))
    jobs.start(flow(CANARY))
    assert jobs.poll(1) == Progress(step=1, tensors=0, again=True)
    assert jobs.poll(1) == sum_of(3)


def test_what_a_rank_said_first_is_its_result() -> None:
    """A rank whose work failed says so as often as it is asked."""
    later = Failure(kind="internal", message="not this one", status=500)
    jobs = Jobs(Ranks([ERROR, later], [GOES_ON, done(2)]))
    jobs.start(flow(CANARY))
    jobs.poll(1)
    assert jobs.poll(1) == ERROR


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_at_the_start_ends_the_job_without_polling(rank: int) -> None:
    started: list[RankResult] = [Accepted(), Accepted()]
    started[rank] = ERROR
    ranks = Ranks([], [], started=started)
    jobs = Jobs(ranks)
    with pytest.raises(UpdateError, match="no room"):
        jobs.start(flow())
    with pytest.raises(UpdateError) as caught:
        jobs.poll(1)
    assert (caught.value.kind, caught.value.status) == ("unknown-job", 404)
    jobs.reap()
    assert [method for method, *_ in ranks.calls] == ["stage"]


def test_what_finishing_raises_is_the_result() -> None:
    def broken(results: list[RankResult]) -> Result:
        raise KeyError("value")

    jobs = Jobs(Ranks([done(1)]))
    jobs.start(flow(finish=broken))
    result = jobs.poll(1)
    assert isinstance(result, Failure)
    assert (result.kind, result.status) == ("internal", 500)


def test_a_result_is_told_once() -> None:
    jobs = Jobs(Ranks([done(1)]))
    jobs.start(flow())
    assert jobs.poll(1) == sum_of(1)
    with pytest.raises(UpdateError, match="no job 1"):
        jobs.poll(1)


def test_a_job_that_nobody_polls_is_finished_all_the_same() -> None:
    finished: list[list[RankResult]] = []

    def finish(results: list[RankResult]) -> Result:
        finished.append(results)
        return summed(results)

    jobs = Jobs(Ranks([GOES_ON, done(4)]))
    jobs.start(flow(finish=finish))
    jobs.reap()
    assert finished == []
    jobs.reap()
    jobs.reap()
    assert len(finished) == 1
    assert jobs.poll(1) == sum_of(4)
    with pytest.raises(UpdateError):
        jobs.poll(1)


def test_jobs_have_numbers_of_their_own() -> None:
    ranks = Ranks([done(1), done(2)])
    jobs = Jobs(ranks)
    assert [jobs.start(flow()) for _ in range(2)] == [JobStarted(job=1), JobStarted(job=2)]
    assert jobs.poll(2) == sum_of(1)
    assert jobs.poll(1) == sum_of(2)


def test_only_the_last_results_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_RESULTS", 2)
    jobs = Jobs(Ranks([done(value) for value in range(4)]))
    for _ in range(4):
        jobs.start(flow())
    jobs.reap()
    assert [jobs.poll(job) for job in (3, 4)] == [sum_of(2), sum_of(3)]
    for job in (1, 2):
        with pytest.raises(UpdateError, match="no job"):
            jobs.poll(job)


def test_what_a_job_ends_in_may_take_in_others() -> None:
    jobs = Jobs(Ranks([done(1), done(2)]))

    def finish(results: list[RankResult]) -> Result:
        jobs.reap()
        return summed(results)

    jobs.start(flow(finish=finish))
    jobs.start(flow(FINGERPRINT))
    jobs.reap()
    assert [jobs.poll(job) for job in (1, 2)] == [sum_of(1), sum_of(2)]


def test_settling_waits_until_no_rank_works_any_more() -> None:
    jobs = Jobs(Ranks([GOES_ON, GOES_ON, done(1)], [GOES_ON, done(2)]))
    jobs.start(flow())
    jobs.settle()
    assert jobs.poll(1) == sum_of(3)


def test_settling_goes_through_every_step() -> None:
    jobs = Jobs(Ranks([done(1), GOES_ON, done(2)]))
    jobs.start(two_steps())
    jobs.settle()
    assert jobs.poll(1) == sum_of(3)


def two_steps() -> Flow[Result]:
    first = yield OnRanks(STAGE)
    second = yield OnRanks(CANARY)
    return summed([*first, *second])


def test_the_next_step_of_a_job_is_asked_about_at_once() -> None:
    """So an engine between two steps need not come by again for each part."""
    ranks = Ranks([done(1), done(2), GOES_ON, done(3)])
    jobs = Jobs(ranks)

    def steps() -> Flow[Result]:
        results = yield OnRanks(STAGE)
        for _ in range(2):
            results += yield OnRanks(CANARY)
        return summed(results)

    jobs.start(steps())
    assert jobs.poll(1) == Progress(step=3)
    assert [call for call in ranks.calls if call[0] != "poll"] == [
        ("stage", 1),
        ("run_canary", 2),
        ("run_canary", 3),
    ]
    assert jobs.poll(1) == sum_of(6)


def test_a_job_whose_steps_end_at_once_is_over_when_it_is_asked_about() -> None:
    jobs = Jobs(Ranks([done(1), done(2)]))
    assert jobs.start(two_steps()) == JobStarted(job=1)
    assert jobs.poll(1) == sum_of(3)


def test_what_needs_no_rank_is_no_job() -> None:
    def at_once() -> Flow[Result]:
        return sum_of(5)
        yield

    ranks = Ranks()
    jobs = Jobs(ranks)
    assert jobs.start(at_once()) == sum_of(5)
    assert ranks.calls == []


@pytest.mark.parametrize("last", [done(2), ERROR], ids=["well", "not well"])
def test_a_flow_knows_when_it_ends(last: RankResult) -> None:
    """Well or not: whoever waits for it is told so."""
    ends: list[None] = []

    def noted() -> Flow[Result]:
        try:
            return (yield from two_steps())
        finally:
            ends.append(None)

    jobs = Jobs(Ranks([done(1), last]))
    jobs.start(noted())
    assert ends == []
    assert (jobs.poll(1) == ERROR) == (last is ERROR)
    assert ends == [None]


def test_a_job_is_silent_since_a_rank_last_did_something(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [10.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    jobs = Jobs(Ranks([GOES_ON, RankProgress(tensors=3), RankProgress(tensors=3)]))
    jobs.start(flow())
    for clock[0], silence in ((12.0, 2.0), (15.0, 0.0), (16.0, 1.0)):
        jobs.reap()
        assert jobs.silence(1) == silence


@pytest.mark.parametrize("when", ["start", "rank", "finish"])
def test_nothing_follows_a_step_that_failed(when: str) -> None:
    def refused(results: list[RankResult]) -> Result:
        raise ERROR.error

    def goes_on() -> Flow[Result]:
        yield from flow(CANARY, finish=refused if when == "finish" else summed)
        raise AssertionError("it went on")

    answer = ERROR if when == "rank" else done(1)
    jobs = Jobs(Ranks([answer], started=[ERROR] if when == "start" else None))
    if when == "start":
        with pytest.raises(UpdateError, match="no room"):
            jobs.start(goes_on())
        return
    jobs.start(goes_on())
    assert jobs.poll(1) == ERROR


def test_a_poll_that_has_waited_may_come_again_at_once() -> None:
    jobs = Jobs(Ranks([GOES_ON, done(1)]), lambda: 0.01)
    jobs.start(flow())
    assert jobs.poll(1) == Progress(step=1, tensors=0, again=True)
    assert jobs.poll(1) == sum_of(1)


@pytest.mark.parametrize("alike", [True, False])
def test_a_rank_that_fails_between_the_others_collectives_ends_the_engine(alike: bool) -> None:
    """The others have met in some that it has left: its next step would meet theirs. Work without collectives goes on."""
    reasons: list[str] = []
    jobs = Jobs(Ranks([RankProgress(again=alike), done(1)], [ERROR]), end=reasons.append)
    jobs.start(flow(CANARY))
    jobs.poll(1)
    assert bool(reasons) == alike
    assert all("no room" in reason for reason in reasons)
