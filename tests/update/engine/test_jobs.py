# SPDX-License-Identifier: Apache-2.0
"""Jobs against ranks that answer from a script."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.engine import jobs as module
from vllm_fp8ext.update.engine.jobs import Jobs, Result

ERROR = UpdateError("out-of-memory", "no room", status=507)


class Ranks:
    """`script`: for each rank its answers to `poll`, in order; then, as a rank whose job is over, `{"done": False}`."""

    def __init__(self, *script: list[Result], started: list[Result] | None = None) -> None:
        self.script = [list(answers) for answers in script]
        self.started = started or [{} for _ in script]
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, method: str, *arguments: Any) -> list[Result]:
        self.calls.append((method, *arguments))
        if method != "poll":
            return self.started
        return [answers.pop(0) if answers else {"done": False, "tensors": 0} for answers in self.script]


def done(value: int) -> Result:
    return {"done": True, "value": value}


def summed(results: list[Result]) -> Result:
    for found in results:
        if "error" in found:
            raise UpdateError.from_dict(found["error"])
    return {"sum": sum(found["value"] for found in results)}


def test_a_job_is_started_on_every_rank_and_polled_to_its_end() -> None:
    ranks = Ranks([{"done": False, "tensors": 2}, done(1)], [{"done": False, "tensors": 5}, done(2)])
    jobs = Jobs(ranks)
    assert jobs.start("stage", "u1", [], finish=summed) == {"job": 1}
    assert jobs.poll(1) == {"done": False, "tensors": 5, "again": False}
    assert jobs.poll(1) == {"done": True, "sum": 3}
    assert ranks.calls == [("stage", 1, "u1", []), ("poll", 1, 0.0), ("poll", 1, 0.0)]


@pytest.mark.parametrize("slow", [0, 1])
def test_a_rank_that_is_done_waits_for_the_others(slow: int) -> None:
    """It goes on being asked, as every rank must be, and what it answers then is not its result."""
    script = [[done(1)], [done(2)]]
    script[slow] = [{"done": False, "tensors": 1}, {"done": False, "tensors": 2}, *script[slow]]
    jobs = Jobs(Ranks(*script))
    jobs.start("stage", finish=summed)
    assert [jobs.poll(1)["done"], jobs.poll(1)["done"]] == [False, False]
    assert jobs.poll(1) == {"done": True, "sum": 3}


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_while_it_runs_is_told_when_every_rank_is_done(rank: int) -> None:
    script = [[{"done": False}, done(1)], [{"done": False}, done(2)]]
    script[rank] = [{"error": ERROR.as_dict()}]
    jobs = Jobs(Ranks(*script))
    jobs.start("sing", finish=summed)
    assert not jobs.poll(1)["done"]
    assert jobs.poll(1) == {"done": True, "error": ERROR.as_dict()}


def test_a_job_that_goes_on_in_polls_alone_says_so() -> None:
    jobs = Jobs(Ranks([{"done": False}, done(1)], [{"done": False, "again": True}, done(2)]))
    jobs.start("sing", finish=summed)
    assert jobs.poll(1) == {"done": False, "tensors": 0, "again": True}
    assert jobs.poll(1) == {"done": True, "sum": 3}


def test_what_a_rank_said_first_is_its_result() -> None:
    """A rank whose work failed says so as often as it is asked."""
    later = UpdateError("internal", "not this one", status=500)
    jobs = Jobs(Ranks([{"error": ERROR.as_dict()}, {"error": later.as_dict()}], [{"done": False}, done(2)]))
    jobs.start("sing", finish=summed)
    jobs.poll(1)
    assert jobs.poll(1) == {"done": True, "error": ERROR.as_dict()}


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_at_the_start_ends_the_job_without_polling(rank: int) -> None:
    started: list[Result] = [{}, {}]
    started[rank] = {"error": ERROR.as_dict()}
    ranks = Ranks([], [], started=started)
    jobs = Jobs(ranks)
    assert jobs.start("stage", finish=summed) == {"error": ERROR.as_dict()}
    with pytest.raises(UpdateError) as caught:
        jobs.poll(1)
    assert (caught.value.kind, caught.value.status) == ("unknown-job", 404)
    jobs.reap()
    assert [method for method, *_ in ranks.calls] == ["stage"]


def test_what_finishing_raises_is_the_result() -> None:
    def broken(results: list[Result]) -> Result:
        raise KeyError("value")

    jobs = Jobs(Ranks([done(1)]))
    jobs.start("stage", finish=broken)
    found = jobs.poll(1)
    assert found["done"]
    assert (found["error"]["kind"], found["error"]["status"]) == ("internal", 500)


def test_a_result_is_told_once() -> None:
    jobs = Jobs(Ranks([done(1)]))
    jobs.start("stage", finish=summed)
    assert jobs.poll(1) == {"done": True, "sum": 1}
    with pytest.raises(UpdateError, match="no job 1"):
        jobs.poll(1)


def test_a_job_that_nobody_polls_is_finished_all_the_same() -> None:
    finished: list[list[Result]] = []

    def finish(results: list[Result]) -> Result:
        finished.append(results)
        return summed(results)

    jobs = Jobs(Ranks([{"done": False}, done(4)]))
    jobs.start("stage", finish=finish)
    jobs.reap()
    assert finished == []
    jobs.reap()
    jobs.reap()
    assert len(finished) == 1
    assert jobs.poll(1) == {"done": True, "sum": 4}
    with pytest.raises(UpdateError):
        jobs.poll(1)


def test_jobs_have_numbers_of_their_own() -> None:
    ranks = Ranks([done(1), done(2)])
    jobs = Jobs(ranks)
    assert [jobs.start("stage", finish=summed) for _ in range(2)] == [{"job": 1}, {"job": 2}]
    assert jobs.poll(2) == {"done": True, "sum": 1}
    assert jobs.poll(1) == {"done": True, "sum": 2}


def test_only_the_last_results_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_RESULTS", 2)
    jobs = Jobs(Ranks([done(value) for value in range(4)]))
    for _ in range(4):
        jobs.start("stage", finish=summed)
    jobs.reap()
    assert [jobs.poll(job)["sum"] for job in (3, 4)] == [2, 3]
    for job in (1, 2):
        with pytest.raises(UpdateError, match="no job"):
            jobs.poll(job)


def test_what_a_job_ends_in_may_take_in_others() -> None:
    jobs = Jobs(Ranks([done(1), done(2)]))

    def finish(results: list[Result]) -> Result:
        jobs.reap()
        return summed(results)

    jobs.start("stage", finish=finish)
    jobs.start("fingerprint", finish=summed)
    jobs.reap()
    assert [jobs.poll(job)["sum"] for job in (1, 2)] == [1, 2]


def test_settling_waits_until_no_rank_works_any_more() -> None:
    ranks = Ranks([{"done": False}, {"done": False}, done(1)], [{"done": False}, done(2)])
    jobs = Jobs(ranks)
    serial = jobs.start("work", finish=summed)["job"]
    jobs.settle()
    assert jobs.poll(serial) == {"done": True, "sum": 3}


def test_what_a_job_goes_on_in_is_asked_at_once() -> None:
    """So an engine between two steps need not come by again for each part."""
    ranks = Ranks([done(1), done(2), {"done": False}, done(3)])
    jobs = Jobs(ranks)

    def then(results: list[Result]) -> Result:
        return jobs.start("sing", finish=summed if results[0]["value"] > 1 else then)

    jobs.start("stage", finish=then)
    assert jobs.poll(1) == {"done": True, "job": 3}
    assert jobs.poll(3) == {"done": True, "sum": 3}


def test_something_follows_a_job_and_those_that_it_goes_on_in() -> None:
    jobs = Jobs(Ranks([done(1), done(2)]))
    followed: list[str] = []

    def then() -> Result:
        followed.append("then")
        return {"result": "of then"}

    started = jobs.start("stage", finish=lambda results: jobs.start("sing", finish=summed))
    assert jobs.followed(started, then) == {"job": 1}
    assert followed == []
    assert jobs.poll(1) == {"done": True, "result": "of then"}
    assert followed == ["then"]
    assert jobs.followed({"state": "prepared"}, then) == {"result": "of then"}


@pytest.mark.parametrize("last", [done(2), {"error": ERROR.as_dict()}], ids=["well", "not well"])
def test_where_a_job_has_moved_is_told_to_its_end(last: Result) -> None:
    jobs = Jobs(Ranks([done(1), last]))
    moves: list[int | None] = []
    started = jobs.start("stage", finish=lambda results: jobs.start("sing", finish=summed))
    assert jobs.watched(started, moves.append) == started
    assert moves == [1]
    assert ("error" in jobs.poll(1)) == ("error" in last)
    assert moves == [1, 2, None]


def test_what_is_no_job_has_ended() -> None:
    moves: list[int | None] = []
    refused = {"error": ERROR.as_dict()}
    assert Jobs(Ranks()).watched(refused, moves.append) == refused
    assert moves == [None]


def test_a_job_is_silent_since_a_rank_last_did_something(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [10.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    jobs = Jobs(
        Ranks([{"done": False, "tensors": 0}, {"done": False, "tensors": 3}, {"done": False, "tensors": 3}])
    )
    jobs.start("stage", finish=summed)
    for clock[0], silence in ((12.0, 2.0), (15.0, 0.0), (16.0, 1.0)):
        jobs.reap()
        assert jobs.silence(1) == silence


@pytest.mark.parametrize("when", ["start", "rank", "finish"])
def test_nothing_follows_a_job_that_failed(when: str) -> None:
    def then() -> Result:
        raise AssertionError("it went on")

    def refused(results: list[Result]) -> Result:
        raise ERROR

    answer = {"error": ERROR.as_dict()} if when == "rank" else done(1)
    jobs = Jobs(Ranks([answer], started=[{"error": ERROR.as_dict()}] if when == "start" else None))
    started = jobs.start("sing", finish=refused if when == "finish" else summed)
    told = jobs.followed(started, then)
    if when != "start":
        told = jobs.poll(told["job"])
    assert told["error"] == ERROR.as_dict()


def test_a_poll_that_has_waited_may_come_again_at_once() -> None:
    jobs = Jobs(Ranks([{"done": False}, done(1)]), lambda: 0.01)
    jobs.start("stage", finish=summed)
    assert jobs.poll(1) == {"done": False, "tensors": 0, "again": True}
    assert jobs.poll(1) == {"done": True, "sum": 1}


@pytest.mark.parametrize("alike", [True, False])
def test_a_rank_that_fails_between_the_others_collectives_ends_the_engine(alike: bool) -> None:
    """The others have met in some that it has left: its next step would meet theirs. Work without collectives goes on."""
    reasons: list[str] = []
    going_on: Result = {"done": False, "again": True} if alike else {"done": False}
    jobs = Jobs(Ranks([going_on, done(1)], [{"error": ERROR.as_dict()}]), end=reasons.append)
    jobs.start("sing", finish=summed)
    jobs.poll(1)
    assert bool(reasons) == alike
    assert all("no room" in reason for reason in reasons)
