# SPDX-License-Identifier: Apache-2.0
"""What the update engine refuses before it asks a rank."""

import itertools
import time
from typing import Any

import pytest

from vllm_fp8ext.config import Settings
from vllm_fp8ext.errors import Failure, UpdateError
from vllm_fp8ext.update.contract.labels import Label
from vllm_fp8ext.update.contract.manifest import Manifest
from vllm_fp8ext.update.contract.rank_results import (
    Accepted,
    RankResult,
)
from vllm_fp8ext.update.contract.results import (
    Done,
    JobStarted,
    Joined,
    Lifetime,
    Progress,
    ServedDigests,
    Stale,
    VerifiedWeights,
    Waiting,
)
from vllm_fp8ext.update.contract.update_errors import NO_CURRENT_WEIGHTS, NO_WEIGHTS, NOT_CURRENT
from vllm_fp8ext.update.engine.engine import UpdateEngine
from vllm_fp8ext.update.engine.session import Running, Session, State
from vllm_fp8ext.update.engine.timestamp import Moment

from .idle_core import SPEC, IdleCore, Ranks, opened


@pytest.fixture
def core() -> IdleCore:
    return IdleCore()


@pytest.fixture
def engine(core: IdleCore) -> UpdateEngine:
    return UpdateEngine(core)  # type: ignore[arg-type]  # the rest is not asked for


def test_api_server_processes_agree_on_the_largest_body(
    engine: UpdateEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the one that each of them takes, whichever opens an update."""
    manifest = Manifest({"w": SPEC}, frozenset(), {"w": ()}, "fp32", 1)
    monkeypatch.setattr(engine._model, "manifest", lambda: manifest)
    for chunk_bytes in (100, 80, None, 90):
        assert engine.handle("join", {"chunk_bytes": chunk_bytes}) == Joined(pids=[7])
    before = engine.change()
    told = engine.handle("open", {"id": "u"})
    assert (told.max_chunk_bytes, told.group) == (80, None)
    assert engine.change() == {**before, "update": "u"}
    engine.handle("abandon", {"id": "u"})
    assert engine.change() == before


CALLS = [
    ("stage", {"chunk": "0", "source": {}, "tensors": [["w", [2], "bfloat16", 0, 4]], "size": 4}),
    ("prepare", {}),
    ("commit", {}),
]


@pytest.mark.parametrize(("operation", "arguments"), CALLS)
def test_a_partial_update_that_was_open_before_does_not_heal(
    engine: UpdateEngine, operation: str, arguments: dict[str, Any]
) -> None:
    session = opened(engine, partial=True, base_epoch=0)
    if operation == "commit":
        session.state = State.PREPARED
    engine.committer.poisoned = "half of it"
    result = engine.handle(operation, {"id": "u", **arguments})
    assert result.kind == "poisoned"


@pytest.mark.parametrize(
    "operation", ["open", "check", "stage", "prepare", "commit", "rollback", "digests", "verify"]
)
def test_nothing_that_needs_the_weights_is_done_while_they_are_asleep(
    engine: UpdateEngine, core: IdleCore, operation: str
) -> None:
    core.sleeps = True
    assert engine.handle(operation, {}).kind == "asleep"


@pytest.mark.parametrize(("instance", "kind"), [("abc", None), (None, None), ("dead", "other-instance")])
def test_an_update_for_another_life_of_the_engine_is_refused(
    core: IdleCore, engine: UpdateEngine, instance: str | None, kind: str | None
) -> None:
    engine._model._manifest = Manifest({"w": SPEC}, frozenset(), {"w": ()}, "fp32", 1)
    answer = engine.handle("open", {"id": "u", "instance": instance, "base_epoch": 0})
    assert getattr(answer, "kind", None) == kind
    if kind:
        details = answer.details
        assert (details["expected"], details["found"]) == ("dead", "abc")
        assert not engine.updates.sessions


def test_what_is_served_names_the_life_of_the_engine(core: IdleCore, engine: UpdateEngine) -> None:
    asked(core, engine, Ranks())
    assert engine.handle("status", {}).instance == "abc"
    started = engine.handle("commit", {"id": "u"})
    done = engine.handle("poll", {"job": started.job})
    assert done.result["instance"] == "abc"


def test_memory_is_not_given_back_while_a_part_was_overwritten(engine: UpdateEngine) -> None:
    engine.sleeping.before(1)
    engine.committer._held = 0.0
    with pytest.raises(UpdateError, match="in place"):
        engine.sleeping.before(1)
    assert engine.handle("may_sleep", {}).kind == "update-open"


def test_what_could_not_be_computed_again_is_kept_before_anything_is_written_in_place(core: IdleCore) -> None:
    core.settings = Settings(staging="inplace")
    vars(core)["irreplaceable"] = lambda: 1
    engine = UpdateEngine(core)  # type: ignore[arg-type]  # the rest is not asked for
    session = opened(engine, inplace=True)
    session.running = Running.RECOMPUTE
    told = engine.handle("stage", {"id": "u", **CALLS[0][1]})
    assert told.kind == "not-recomputable"
    assert not session.chunks
    assert not engine.committer.held


def asked(core: IdleCore, engine: UpdateEngine, ranks: Ranks) -> Session:
    """An update in which nothing is missing, of a core that can be paused and asks these ranks."""
    session = opened(engine)
    session.receive("0", [SPEC], 4)
    session.staged("0", [])
    engine._fingerprints.keep(engine.committer.live, [0], None)
    engine._model._manifest = session.manifest
    engine.jobs._ranks = ranks
    vars(core).update(
        ranks=ranks,
        compiled=[],
        stop=lambda: None,
        release=lambda: None,
        refuse_requests=lambda: vars(core).update(refuses=True),
        drain=lambda: None,
        begin_step=lambda: None,
        resume=lambda: None,
        restart_prompts=lambda: (0, 0),
        enter_epoch=lambda label, recompute: None,
    )
    return session


def test_a_commit_prepares_what_nobody_prepared_in_the_same_job(core: IdleCore, engine: UpdateEngine) -> None:
    ranks = Ranks()
    session = asked(core, engine, ranks)
    started = engine.handle("commit", {"id": "u"})
    assert session.state is State.OPEN
    done = engine.handle("poll", {"job": started.job})
    assert (done.state, done.result["epoch"]) == ("committed", 1)
    assert ranks.calls == [
        "fingerprint_shadow",
        "poll",
        "run_canary",
        "poll",
        "swap",
        "wait_for_swap",
        "fingerprint",
        "poll",
    ]
    assert engine.handle("commit", {"id": "u"}).result == done.result


@pytest.mark.parametrize("inplace", [False, True])
def test_phases_and_the_time_between_them_are_the_whole(
    core: IdleCore, engine: UpdateEngine, monkeypatch: pytest.MonkeyPatch, inplace: bool
) -> None:
    """In place, the engine stands still from the first tensor on: that is no second time."""
    ticks = itertools.count(1000)
    for clock in ("perf_counter", "monotonic"):
        monkeypatch.setattr(time, clock, lambda: float(next(ticks)))
    session = asked(core, engine, Ranks())
    next(ticks)  # the answer to opening is on its way
    if inplace:
        engine.committer._held = time.perf_counter()
    first, second, end = (time.perf_counter() for _ in range(3))
    session.took_staging(second, end)  # as they are polled, not as they end
    session.took_staging(first, end - 0.5)
    for _ in range(5):
        next(ticks)
    seconds = ended(engine, "commit", id="u").seconds
    assert seconds["staging"] == 2
    worked = seconds["pause"] + seconds["verify"]
    if not inplace:
        worked += seconds["staging"] + seconds["prepare"]
    assert seconds["waiting"] >= (1 if inplace else 6)
    assert seconds["waiting"] + worked == seconds["total"]


def test_a_recorded_canary_sings_in_the_job_that_takes_the_fingerprints(
    core: IdleCore, engine: UpdateEngine
) -> None:
    ranks = Ranks(recorded=True)
    session = asked(core, engine, ranks)
    started = engine.handle("prepare", {"id": "u"})
    assert engine.handle("poll", {"job": started.job}).state == "prepared"
    assert ranks.calls == ["fingerprint_shadow", "poll"]
    assert (session.fingerprints, session.seconds["fingerprint"]) == ([1], 0.0)


@pytest.mark.parametrize("method", ["fingerprint_shadow", "run_canary"])
def test_a_commit_ends_where_its_preparation_fails(core: IdleCore, engine: UpdateEngine, method: str) -> None:
    ranks = Ranks(method)
    session = asked(core, engine, ranks)
    started = engine.handle("commit", {"id": "u"})
    assert engine.handle("poll", {"job": started.job}).kind == "internal"
    assert session.state is State.OPEN
    assert "swap" not in ranks.calls


def ended(engine: UpdateEngine, operation: str, **arguments: Any) -> Any:
    """What becomes of an operation that is a job."""
    return engine.handle("poll", {"job": engine.handle(operation, arguments).job})


def confirming(core: IdleCore, engine: UpdateEngine, ranks: Ranks) -> int:
    """The job of a commit whose exchange is done."""
    asked(core, engine, ranks)
    ended(engine, "prepare", id="u")
    ranks.busy = True
    job: int = engine.handle("commit", {"id": "u"}).job
    return job


def test_a_commit_ends_when_every_rank_serves_what_was_prepared(core: IdleCore, engine: UpdateEngine) -> None:
    ranks = Ranks()
    job = confirming(core, engine, ranks)
    for operation in ("commit", "prepare", "open", "rollback"):
        arguments = {"id": "u"} if operation != "rollback" else {}
        assert engine.handle(operation, arguments) == Waiting(requests=0), operation
    for operation, arguments in (("abandon", {"id": "u"}), ("stage", {"id": "u", **CALLS[0][1]})):
        assert engine.handle(operation, arguments).kind == "wrong-state"
    assert engine.handle("open", {}).kind == "update-open"
    assert ranks.calls.count("swap") == 1
    assert engine.handle("update", {"id": "u"}).state == "committing"
    ranks.busy = False
    again = engine.handle("commit", {"id": "u"})
    assert (again.state, again.seconds.keys() >= {"exchange", "verify", "total"}) == ("committed", True)
    assert engine.handle("poll", {"job": job}).result == again.result
    assert engine.status().totals["outcomes"]["committed"] == 1


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("fails", ["", "fingerprint"], ids=["other contents", "unreadable"])
def test_an_exchange_that_left_anything_else_poisons(
    core: IdleCore, engine: UpdateEngine, fails: str, partial: bool
) -> None:
    ranks = Ranks(fails)
    job = confirming(core, engine, ranks)
    engine.updates.get("u").partial = partial
    ranks.busy, ranks.fingerprint = False, 1 if fails else 2
    error = engine.handle("poll", {"job": job})
    assert (error.kind, error.status) == ("poisoned", 503)
    assert vars(core)["refuses"]
    status = engine.status()
    assert (status.state, status.previous_version) == ("poisoned", None)
    assert status.totals["outcomes"]["committed"] == 0
    session = engine.updates.get("u")
    assert (session.state, session.healing) == (State.ABANDONED if partial else State.OPEN, True)
    if not partial:
        assert engine.handle("commit", {"id": "u"}).kind == "incomplete"


def test_a_rank_that_does_not_say_what_it_serves_ends_the_engine(
    core: IdleCore, engine: UpdateEngine
) -> None:
    class Ended(BaseException):
        pass

    def end(reason: str) -> None:
        raise Ended(reason)

    vars(core)["end"] = end
    confirming(core, engine, Ranks())
    engine.status()
    assert engine._check._since is not None
    engine._check._since -= core.settings.deadline_seconds
    with pytest.raises(Ended, match="not confirmed within"):
        engine.handle("status", {})


def test_before_its_weights_are_discarded_an_engine_knows_what_it_serves(
    core: IdleCore, engine: UpdateEngine
) -> None:
    ranks = Ranks()
    confirming(core, engine, ranks)
    ranks.busy = False
    engine.sleeping.before(2)
    assert engine.updates.get("u").state is State.COMMITTED


def test_a_poisoned_engine_waits_for_no_request(core: IdleCore, engine: UpdateEngine) -> None:
    ranks = Ranks()
    asked(core, engine, ranks)
    resumed: list[None] = []
    vars(core).update(admit_no_more=lambda: None, unfinished=lambda: 1, interrupted=lambda: False)
    ended(engine, "prepare", id="u")
    engine.updates.get("u").running = Running.WAIT
    assert engine.handle("commit", {"id": "u"}) == Waiting(requests=1)
    engine.committer.condemn("half of it")
    vars(core)["resume"] = lambda: resumed.append(None)
    engine.handle("abandon", {"id": "u"})
    assert not resumed


def test_a_rollback_to_anything_else_than_what_was_served_poisons(
    core: IdleCore, engine: UpdateEngine
) -> None:
    ranks = Ranks()
    job = confirming(core, engine, ranks)
    ranks.busy = False
    engine.handle("poll", {"job": job})
    ranks.fingerprint = 0
    done = ended(engine, "rollback")
    assert (done.epoch, done.version, "verify" in done.seconds) == (2, "epoch-0", True)
    assert ended(engine, "rollback").kind == "poisoned"
    assert engine.status().totals["outcomes"]["rolled-back"] == 1


def test_a_16_bit_kv_cache_has_no_scales(engine: UpdateEngine) -> None:
    error = engine.handle("kv_scales", {})
    assert (error.kind, error.status) == ("no-kv-scales", 404)


def test_scales_are_not_read_for_the_first_time_from_memory_that_was_given_back() -> None:
    core = IdleCore()
    core.settings, core.kv_cache_dtype, core.sleeps = Settings(kv_scales="calibrate"), "fp8", True  # type: ignore[arg-type]
    engine = UpdateEngine(core)  # type: ignore[arg-type]  # the rest is not asked for
    assert engine.handle("kv_scales", {}).kind == "asleep"


@pytest.mark.parametrize(
    ("running", "settings", "rate"),
    [
        (0, Settings(), 0.0),
        (3, Settings(), 80e9),
        (3, Settings(busy_staging_rate=1e9), 1e9),
        (3, Settings(staging="inplace"), 0.0),
    ],
    ids=["idle", "busy", "setting", "in place"],
)
def test_staging_has_a_pace_beside_running_requests(running: int, settings: Settings, rate: float) -> None:
    rates = []

    class Core(IdleCore):
        def unfinished(self) -> int:
            return running

        def ranks(self, method: str, *arguments: Any) -> list[RankResult]:
            assert method == "stage"
            rates.append(arguments[-3])
            return [Accepted()]

        def hold(self) -> None:
            pass

    core = Core()
    core.settings = settings
    engine = UpdateEngine(core)  # type: ignore[arg-type]
    opened(engine)
    started = engine.stage("u", "0", {}, [["w", [2], "bfloat16", 0, 4]], 4)
    assert rates == [rate]
    assert started == JobStarted(job=1, soonest=4 / rate if rate else 0.0)


def under_way(core: IdleCore, engine: UpdateEngine) -> tuple[Ranks, JobStarted]:
    """The ranks that prepare an update, busy, and what started it."""
    ranks = Ranks()
    asked(core, engine, ranks)
    started = engine.handle("prepare", {"id": "u"})
    ranks.busy = True
    return ranks, started


def prepared(engine: UpdateEngine) -> str:
    """The state of an update that is being prepared, after that."""
    while isinstance(state := engine.handle("prepare", {"id": "u"}), Waiting):
        pass
    return str(state.state)


def test_two_calls_that_prepare_an_update_wait_for_one_preparation(
    core: IdleCore, engine: UpdateEngine
) -> None:
    ranks, started = under_way(core, engine)
    for operation in ("prepare", "commit"):
        assert engine.handle(operation, {"id": "u"}) == Waiting(requests=0)
    ranks.busy = False
    assert engine.handle("poll", {"job": started.job}).state == "prepared"
    assert engine.handle("prepare", {"id": "u"}).state == "prepared"
    started = engine.handle("commit", {"id": "u"})
    assert engine.handle("poll", {"job": started.job}).state == "committed"
    calls = [call for call in ranks.calls if call != "poll"]
    assert calls == ["fingerprint_shadow", "run_canary", "swap", "wait_for_swap", "fingerprint"]


def test_nobody_waits_for_a_preparation_in_which_nothing_is_done(
    core: IdleCore, engine: UpdateEngine
) -> None:
    ranks, started = under_way(core, engine)
    assert engine.handle("prepare", {"id": "u"}) == Waiting(requests=0)
    engine.jobs._jobs[started.job].since -= core.settings.deadline_seconds
    for operation in ("prepare", "commit"):
        assert engine.handle(operation, {"id": "u"}).kind == "engine-timeout"
    ranks.busy = False
    assert prepared(engine) == "prepared"


def test_a_preparation_that_nobody_asks_about_goes_on_with_the_next_call(
    core: IdleCore, engine: UpdateEngine
) -> None:
    session = asked(core, engine, Ranks())
    engine.handle("prepare", {"id": "u"})
    assert (prepared(engine), session.state) == ("prepared", State.PREPARED)


@pytest.mark.parametrize("fails", ["fingerprint_shadow", "run_canary"])
def test_a_preparation_that_failed_does_not_hold_up_the_next(
    core: IdleCore, engine: UpdateEngine, fails: str
) -> None:
    ranks = Ranks(fails)
    asked(core, engine, ranks)
    for _ in range(2):
        started = engine.handle("prepare", {"id": "u"})
        assert engine.handle("poll", {"job": started.job}).kind == "internal"


def test_what_was_given_up_while_it_was_prepared_changes_nothing_more(
    core: IdleCore, engine: UpdateEngine
) -> None:
    ranks = Ranks()
    session = asked(core, engine, ranks)
    session.partial = True
    started = engine.handle("prepare", {"id": "u"})
    engine.handle("abandon", {"id": "u"})
    assert engine.handle("poll", {"job": started.job}).kind == "wrong-state"
    assert ranks.calls == ["copy_unsent", "poll"]


def test_a_chunk_ends_the_wait_of_a_commit(core: IdleCore, engine: UpdateEngine) -> None:
    """Requests start again: the commit may never come."""
    session = asked(core, engine, Ranks())
    told: list[str] = []
    vars(core).update(
        unfinished=lambda: 1, admit_no_more=lambda: told.append("wait"), resume=lambda: told.append("go on")
    )
    session.state, session.running = State.PREPARED, Running.WAIT
    assert engine.handle("commit", {"id": "u"}) == Waiting(requests=1)
    session.receive("0", [SPEC], 4)
    assert engine.handle("commit", {"id": "u"}).kind == "staging"
    assert told == ["wait", "go on"]


@pytest.fixture
def waits(core: IdleCore, engine: UpdateEngine) -> list[str]:
    """A rollback waits for a request; what the core is told."""
    told: list[str] = []
    vars(core).update(
        unfinished=lambda: 1,
        interrupted=lambda: False,
        admit_no_more=lambda: told.append("wait"),
        resume=lambda: told.append("go on"),
    )
    engine._model._manifest = Manifest({"w": SPEC}, frozenset(), {"w": ()}, "fp32", 1)
    engine.committer.previous = Label(0, "early")
    assert engine.handle("rollback", {"running": "wait"}) == Waiting(requests=1)
    return told


def test_a_rollback_that_has_lost_its_weights_waits_no_more(engine: UpdateEngine, waits: list[str]) -> None:
    """Another update's first chunk came: requests start again."""
    engine.committer.lose_previous()
    assert engine.handle("rollback", {"running": "wait"}).kind == "no-previous"
    assert waits == ["wait", "go on"]


def test_a_rollback_whose_caller_has_left_waits_no_more(engine: UpdateEngine, waits: list[str]) -> None:
    for _ in range(2):
        assert engine.handle("leave", {}) == Done()
    assert waits == ["wait", "go on"]


def test_a_version_that_nobody_chose_is_that_of_the_epoch(core: IdleCore, engine: UpdateEngine) -> None:
    ranks = Ranks()
    session = asked(core, engine, ranks)
    session.named, session.version = False, "epoch-1"
    engine.committer.previous = Label(0, "early")
    engine._fingerprints.keep(engine.committer.previous, [0], None)
    engine._fingerprints.keep(engine.committer.live, [0], engine.committer.previous)
    ranks.fingerprint = 0
    assert ended(engine, "rollback").epoch == 1
    started = engine.handle("commit", {"id": "u"})
    assert engine.handle("poll", {"job": started.job}).result["version"] == "epoch-2"


@pytest.mark.parametrize("staging", ["shadow", "inplace"])
def test_an_update_does_not_expire_while_it_is_prepared(core: IdleCore, staging: Any) -> None:
    now = [0.0]
    core.settings = Settings(staging=staging)
    engine = UpdateEngine(core, lambda: Moment(now[0], 0.0))  # type: ignore[arg-type]
    ranks = Ranks()
    session = asked(core, engine, ranks)
    session.lifetime = 60.0
    session.touch(Moment(0.0, 0.0))
    started = engine.handle("prepare", {"id": "u"})
    ranks.busy = True
    now[0] = 70.0
    assert isinstance(engine.handle("poll", {"job": started.job}), Progress)
    assert session.state is State.OPEN
    ranks.busy = False
    assert engine.handle("poll", {"job": started.job}).state == "prepared"
    now[0] = 129.0
    assert engine.handle("update", {"id": "u"}).state == "prepared"
    assert engine.handle("check", {"id": "u"}) == Lifetime(seconds=60.0)
    now[0] = 190.0
    assert engine.handle("update", {"id": "u"}).state == "expired"


@pytest.mark.parametrize("untouched", [True, False])
def test_in_place_a_chunk_that_wrote_nothing_poisons_nothing(core: IdleCore, untouched: bool) -> None:
    error = Failure(kind="transfer-timeout", message="none came", status=408, unchanged=untouched)
    told: list[str] = []

    def ranks(method: str, *_: Any) -> list[RankResult]:
        return [error if method == "poll" else Accepted()]

    core.settings = Settings(staging="inplace")
    vars(core).update(
        ranks=ranks,
        hold=lambda: told.append("hold"),
        resume=lambda: told.append("resume"),
        release=lambda: None,
        stop=lambda: None,
        drain=lambda: None,
        refuse_requests=lambda: told.append("refuse"),
    )
    engine = UpdateEngine(core)  # type: ignore[arg-type]
    opened(engine)
    started = engine.handle("stage", {"id": "u", **CALLS[0][1]})
    assert engine.handle("poll", {"job": started.job}).kind == "transfer-timeout"
    engine.handle("abandon", {"id": "u"})
    assert told == ["hold", "resume" if untouched else "refuse"]
    assert (engine.committer.poisoned is None) == untouched


def test_nobody_is_told_the_digests_of_a_poisoned_engine(engine: UpdateEngine) -> None:
    engine._model._manifest = Manifest({"w": SPEC}, frozenset(), {"w": ()}, "fp32", 1)
    engine.committer.poisoned = "half of it"
    for operation in ("digests", "verify"):
        assert engine.handle(operation, {}).kind == "poisoned"


@pytest.mark.parametrize("operation", ["digests", "verify"])
def test_what_was_read_while_an_exchange_was_tried_is_read_again(
    core: IdleCore, engine: UpdateEngine, operation: str
) -> None:
    """Even one that was undone."""
    asked(core, engine, Ranks())
    engine._model._manifest = Manifest({"w": SPEC}, frozenset(), {"w": ()}, "fp32", 1)
    started = engine.handle(operation, {})
    engine.committer.exchanges += 1
    assert engine.handle("poll", {"job": started.job}) == Stale()


def test_an_engine_that_is_not_current_tells_its_digests_and_becomes_current(
    core: IdleCore, engine: UpdateEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    asked(core, engine, Ranks())
    engine._model._manifest = Manifest({"w": SPEC}, frozenset(), {"w": ()}, "fp32", 1)
    engine._fingerprints.keep(engine.committer.live, [1], None)
    engine.handle("abandon", {"id": "u"})
    for name in ("relabel", "accept_requests", "resume"):
        monkeypatch.setattr(core, name, lambda *_, name=name: told.append(name), raising=False)
    engine.committer.poisoned = NOT_CURRENT
    assert engine.change()["poisoned"] == NOT_CURRENT
    served = engine.handle("poll", {"job": engine.handle("digests", {}).job})
    assert isinstance(served, ServedDigests)
    refused = engine.handle("declare_current", {"epoch": 0, "instance": "another"})
    assert (refused.kind, told) == ("other-instance", [])
    status = engine.handle("declare_current", {"epoch": 0, "version": "7", "instance": "abc"})
    assert (status.state, status.version, told) == ("serving", "7", ["relabel", "accept_requests", "resume"])
    verified = engine.handle("poll", {"job": engine.handle("verify", {}).job})
    assert isinstance(verified, VerifiedWeights), (
        "fingerprints are those of the weights, whatever their label"
    )


@pytest.mark.parametrize(
    ("reason", "state"),
    [
        (NOT_CURRENT, "not-current"),
        (NO_WEIGHTS, "no-weights"),
        (NO_CURRENT_WEIGHTS, "no-weights"),
        ("?", "poisoned"),
    ],
)
def test_the_state_says_why_nothing_is_generated(
    engine: UpdateEngine, monkeypatch: pytest.MonkeyPatch, reason: str, state: str
) -> None:
    monkeypatch.setattr(engine._model, "manifest", lambda: None)
    monkeypatch.setattr(engine.core, "compiled", [], raising=False)
    engine.committer.poisoned = reason
    assert engine.status().state == state
