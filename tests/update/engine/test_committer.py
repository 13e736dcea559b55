# SPDX-License-Identifier: Apache-2.0
"""The commit against an engine core that notes what it is told, and ranks that fail by a script."""

import contextlib
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract.labels import Label
from vllm_fp8ext.update.contract.update_errors import NO_CURRENT_WEIGHTS, NO_WEIGHTS, NOT_CURRENT
from vllm_fp8ext.update.engine import committer as committer_module
from vllm_fp8ext.update.engine.committer import Committer
from vllm_fp8ext.update.engine.session import Running
from vllm_fp8ext.update.engine.totals import Totals

from .scripted_core import BEFORE, NEW, SWAP_SECONDS, ScriptedCore, step_of


@pytest.fixture
def core() -> ScriptedCore:
    return ScriptedCore()


@pytest.fixture
def step(core: ScriptedCore) -> Committer:
    return step_of(core, Totals())


def run(
    step: Committer,
    running: Running = Running.KEEP,
    *,
    label: Label = NEW,
    key: str = "u1",
    wait: float = 1e6,
):
    return step.run(key, label, running, wait)


def refused(step: Committer, *args: Any, **kwargs: Any) -> UpdateError:
    with pytest.raises(UpdateError) as caught:
        run(step, *args, **kwargs)
    return caught.value


SWAP = ["stop", "exchange [0, 1]", "drain"]
COMMIT = ["restart", "epoch 1 step-1", "resume"]


@pytest.mark.parametrize(
    ("running", "told"),
    [
        (Running.KEEP, [*SWAP, *COMMIT, "begin step", "settle"]),
        (Running.RECOMPUTE, [*SWAP, "epoch 1 step-1 recompute", "resume", "begin step", "settle"]),
        (Running.ABORT, [*SWAP, "abort", *COMMIT, "begin step", "settle"]),
    ],
)
def test_what_a_commit_does_and_in_which_order(
    core: ScriptedCore, step: Committer, running: Running, told: list[str]
) -> None:
    core.requests = 3
    phases = run(step, running)
    assert core.told == told
    assert core.swapped == [True, True]
    assert (step.live, step.previous, step.poisoned) == (NEW, BEFORE, None)
    assert phases is not None
    assert phases["exchange"] == SWAP_SECONDS
    assert len(core.reports) == (running is not Running.ABORT), "who was preempted is stalled, too"
    assert phases.keys() == {"drain", "exchange", "caches", "pause"}


@pytest.mark.parametrize("prompts", [0, 1, 2])
def test_prompts_begin_again_before_k_and_v_that_are_kept_are_rewritten(
    core: ScriptedCore, step: Committer, monkeypatch: pytest.MonkeyPatch, prompts: int
) -> None:
    kept: list[bool] = []

    def exchanged(*_: object, keep: bool, **__: object) -> bool:
        assert core.told[-1] == "restart"
        kept.append(keep)
        return False

    monkeypatch.setattr(step._kv, "exchanged", exchanged)
    core.requests, core.prompts = 2, prompts
    run(step)
    assert kept == [prompts < 2]
    assert step._totals.restarts == [prompts, 100 * prompts]
    assert len(core.reports) == 1, "they are stalled, too"


@pytest.mark.parametrize(
    ("takes", "pause"),
    [
        ({"drain": 1.0, "begin step": 0.25, "settle": 9.75}, 11.0),
        ({"drain": 1.0, "begin step": 30.0}, 11.0),
        ({"exchange [0, 1]": 10.0, "drain": 1.0}, 11.0),
        ({"drain": 1.0, "epoch 1 step-1": 20.0}, 21.0),
    ],
    ids=["waited for", "over before the next step is queued", "on the host", "slow caches"],
)
def test_a_pause_ends_with_the_exchange_or_when_the_engine_goes_on(
    core: ScriptedCore,
    step: Committer,
    monkeypatch: pytest.MonkeyPatch,
    takes: dict[str, float],
    pause: float,
) -> None:
    """An exchange of ten seconds on one of the ranks. What has been told took its time."""
    monkeypatch.setattr(time, "perf_counter", lambda: sum(takes.get(told, 0.0) for told in core.told))
    core.swap_seconds = 10.0
    core.requests = 1
    phases = run(step)
    assert phases is not None
    assert phases["pause"] == pause
    assert phases["exchange"] == 10.0
    assert phases["drain"] == sum(takes.get(told, 0.0) for told in SWAP)
    assert phases["caches"] == takes.get("epoch 1 step-1", 0.0)


def test_what_is_served_and_what_was_change_places(core: ScriptedCore, step: Committer) -> None:
    run(step)
    back = Label(2, BEFORE.version)
    run(step, label=back, key="rollback")
    assert (step.live, step.previous, core.swapped) == (back, NEW, [False, False])
    step.lose_previous()
    assert step.previous is None


@pytest.mark.parametrize("running", Running)
def test_an_engine_that_somebody_else_paused_is_left_alone(
    core: ScriptedCore, step: Committer, running: Running
) -> None:
    core.state = "asleep"
    assert refused(step, running).kind == "paused"
    assert (core.told, core.state, step.live) == ([], "asleep", BEFORE)


def test_k_and_v_that_nothing_computes_again_are_not_thrown_away(core: ScriptedCore, step: Committer) -> None:
    core.requests = core.kept = 2
    error = refused(step, Running.RECOMPUTE)
    assert (error.kind, error.details["requests"]) == ("not-recomputable", 2)
    assert "2 requests" in str(error)
    assert (core.told, core.state, step.live) == ([], "on", BEFORE)
    step.poisoned = "half of it"
    step.require_recomputable(Running.RECOMPUTE, "rescale")  # all requests were ended
    step.poisoned = None
    step.require_recomputable(Running.KEEP, "recompute")  # a KV cache of 16 bits has no scales that change
    step._kv.enabled = True
    with pytest.raises(UpdateError, match="computed again"):
        step.require_recomputable(Running.KEEP, "recompute")
    step._held = 0.0
    step.require_recomputable(Running.KEEP, "recompute")  # they came while the engine stands still


# --- waiting for running requests


def test_a_commit_waits_until_every_request_has_finished(core: ScriptedCore, step: Committer) -> None:
    core.requests = 2
    for core.requests in (2, 1, 1):
        assert run(step, Running.WAIT) is None
        assert (core.told, core.state) == (["admit no more"], "admits no more")
    core.requests = 0
    assert run(step, Running.WAIT) is not None
    assert core.told == ["admit no more", *SWAP, *COMMIT, "begin step", "settle"]


def test_without_requests_nothing_is_waited_for(core: ScriptedCore, step: Committer) -> None:
    assert run(step, Running.WAIT) is not None
    assert core.told == ["admit no more", *SWAP, *COMMIT, "begin step", "settle"]


def test_a_commit_that_is_refused_after_it_has_waited_lets_requests_in_again(
    core: ScriptedCore, step: Committer
) -> None:
    step._kv.enabled = True
    core.requests = 1
    asked = ("u1", NEW, Running.WAIT, 1e6, None, "recompute")
    assert step.run(*asked) is None
    assert core.state == "admits no more"
    core.requests, core.kept = 0, 1  # came meanwhile, and can't be computed again
    with pytest.raises(UpdateError, match="computed again"):
        step.run(*asked)
    assert core.state == "on"


def test_a_wait_ends_at_its_deadline(core: ScriptedCore, step: Committer) -> None:
    core.requests = 2
    error = refused(step, Running.WAIT, wait=0.0)
    assert (error.kind, error.status, error.details) == ("wait-timeout", 409, {"running": 2})
    assert (core.told, core.state, step.live) == (["admit no more", "resume"], "on", BEFORE)
    core.requests = 0
    assert run(step, Running.WAIT) is not None, "a commit may be tried again"


def test_one_waits_at_a_time(core: ScriptedCore, step: Committer) -> None:
    core.requests = 1
    run(step, Running.WAIT)
    assert refused(step, Running.WAIT, key="rollback").kind == "commit-waits"
    core.requests = 0
    assert refused(step, Running.WAIT, key="rollback").kind == "commit-waits"
    assert run(step, Running.WAIT) is not None


def test_a_commit_that_has_waited_waits_no_more(core: ScriptedCore, step: Committer) -> None:
    run(step, Running.WAIT)
    core.state = "asleep"
    assert refused(step, label=Label(2, "step-2")).kind == "paused"
    core.state = "on"
    core.requests = 1
    assert run(step, Running.WAIT, key="another") is None


def test_a_wait_does_not_go_on_over_somebody_elses_pause(core: ScriptedCore, step: Committer) -> None:
    core.requests = 1
    assert run(step, Running.WAIT) is None
    core.requests, core.others_paused = 0, True

    def resume() -> None:
        core.told.append("resume")
        core.state = "paused by others"

    core.resume = resume  # type: ignore[method-assign]
    assert refused(step, Running.WAIT).kind == "paused"
    assert (core.told, step.live) == (["admit no more", "resume"], BEFORE)
    core.others_paused = False
    assert refused(step, Running.WAIT).kind == "paused", "it is over"


def test_a_wait_that_is_given_up_lets_requests_in_again(core: ScriptedCore, step: Committer) -> None:
    core.requests = 1
    step.stop_waiting("u1")
    run(step, Running.WAIT)
    step.stop_waiting("another")
    assert core.told == ["admit no more"]
    step.stop_waiting("u1")
    step.stop_waiting("u1")
    assert core.told == ["admit no more", "resume"]
    assert run(step, Running.WAIT, key="another") is None


def test_a_wait_that_nobody_asks_about_is_forgotten(
    core: ScriptedCore, step: Committer, monkeypatch: pytest.MonkeyPatch
) -> None:
    core.requests = 1
    step.tick()
    run(step, Running.WAIT)
    step.tick()
    assert core.told == ["admit no more"]
    monkeypatch.setattr(committer_module, "WAIT_GRACE_SECONDS", -2e6)
    step.tick()
    assert (core.told, core.state) == (["admit no more", "resume"], "on")


# --- failures


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_on_one_rank_is_undone_on_the_other(
    core: ScriptedCore, step: Committer, failing: int
) -> None:
    core.failures = [{failing: False}]
    error = refused(step)
    assert (error.kind, error.status) == ("exchange-failed", 500)
    assert core.told == ["stop", "exchange [0, 1]", f"exchange [{1 - failing}]", "settle", "resume"]
    assert core.swapped == [False, False]
    assert (step.live, step.previous, step.poisoned) == (BEFORE, None, None)
    assert run(step) is not None, "a commit may be tried again"


def test_a_failure_on_every_rank_has_nothing_to_undo(core: ScriptedCore, step: Committer) -> None:
    core.failures = [{0: False, 1: False}]
    assert refused(step).kind == "exchange-failed"
    assert core.told == ["stop", "exchange [0, 1]", "settle", "resume"], (
        "each has undone its own part by then"
    )


def caches_failed(core: ScriptedCore) -> None:
    core.caches_fail = True


def broken(core: ScriptedCore) -> None:
    core.failures = [{0: True}]


def undo_failed(core: ScriptedCore) -> None:
    core.failures = [{0: False}, {1: False}]


def unsettled_undo(core: ScriptedCore) -> None:
    core.failures, core.unsettled = [{0: False}], {1}


poisoning = pytest.mark.parametrize(
    "fault", [broken, undo_failed, unsettled_undo, caches_failed], ids=lambda fault: fault.__name__
)


@poisoning
def test_what_cannot_be_undone_poisons_the_engine(
    core: ScriptedCore, step: Committer, fault: Callable[[ScriptedCore], None]
) -> None:
    core.requests = 1
    fault(core)
    error = refused(step)
    assert (error.kind, error.status) == ("poisoned", 503)
    assert (core.state, core.refusing, step.previous) == ("paused", True, None)
    assert step.poisoned
    assert step.live == BEFORE, "nothing was served under the new label"
    assert "resume" not in core.told
    assert core.told[-1] == "refuse"
    assert "settle" in core.told, "what heals it must not get into an exchange under way"


@poisoning
@pytest.mark.parametrize("running", Running)
def test_the_next_commit_heals(
    core: ScriptedCore, step: Committer, fault: Callable[[ScriptedCore], None], running: Running
) -> None:
    """Whatever it wants for running requests: there are none, and no cached K and V may be found any more. What stood by is
    gone."""
    fault(core)
    refused(step)
    core.told.clear()
    core.caches_fail, core.unsettled = False, set()
    healed = Label(5, "step-5")
    assert run(step, running, label=healed) is not None
    assert [told for told in core.told if told != "abort"] == [
        *SWAP,
        "epoch 5 step-5 recompute",
        "accept",
        "resume",
        "begin step",
        "settle",
    ]
    assert (step.live, step.previous, step.poisoned) == (healed, None, None)
    assert (core.state, core.refusing) == ("on", False)
    run(step, label=Label(6, "step-6"))
    assert step.previous == healed


def test_an_exchange_that_does_not_end_poisons_the_engine(core: ScriptedCore, step: Committer) -> None:
    core.requests, core.unsettled = 1, {1}
    error = refused(step)
    assert (error.kind, error.status) == ("poisoned", 503)
    assert "no device" in str(error)
    assert (core.state, core.refusing, step.previous) == ("paused", True, None)
    core.unsettled = set()
    assert run(step) is not None
    assert (core.state, core.refusing, step.poisoned) == ("on", False, None)


def test_a_heal_that_fails_leaves_the_engine_poisoned(core: ScriptedCore, step: Committer) -> None:
    broken(core)
    refused(step)
    core.failures = [{1: False}]
    assert refused(step).kind == "exchange-failed"
    assert step.poisoned
    assert (core.state, core.refusing) == ("paused", True)
    assert core.told[-2:] == ["exchange [0]", "settle"]
    assert run(step) is not None
    assert core.state == "on"


FAILURES = st.dictionaries(st.integers(0, 3), st.booleans(), max_size=4)


@given(st.integers(1, 4), FAILURES, FAILURES)
def test_all_ranks_exchange_or_none_or_the_engine_is_poisoned(
    ranks: int, first: dict[int, bool], second: dict[int, bool]
) -> None:
    core = ScriptedCore(ranks)
    step = step_of(core, Totals())
    core.failures = [
        {rank: broken for rank, broken in some.items() if rank < ranks} for some in (first, second)
    ]
    if core.failures[0]:
        kind = refused(step).kind
        assert (kind == "poisoned") == (step.poisoned is not None) == core.refusing
    else:
        run(step)
    if step.poisoned is None:
        assert core.swapped == [step.live == NEW] * ranks
        assert core.state == "on"
    else:
        assert core.state == "paused"


# --- the stall


def test_a_stall_lasts_to_the_end_of_the_next_step(core: ScriptedCore) -> None:
    totals = Totals()
    step = step_of(core, totals)
    core.requests = 1
    phases = run(step)
    assert phases is not None
    assert (step.stall_seconds, totals.stalls) == (None, [0, 0.0])
    [report] = core.reports
    report(time.perf_counter())
    assert step.stall_seconds is not None
    assert step.stall_seconds >= phases["pause"]
    assert totals.stalls == [1, step.stall_seconds]


def test_without_requests_nobody_is_stalled(core: ScriptedCore, step: Committer) -> None:
    run(step)
    assert core.reports == []
    assert step.stall_seconds is None


# --- in place


def test_in_place_the_engine_stands_still_until_the_commit(core: ScriptedCore, step: Committer) -> None:
    core.requests = 2
    step.hold(Running.ABORT)
    step.hold(Running.ABORT)
    assert core.told == ["stop", "drain", "abort"]
    step.require_running()  # it is this update that it stands still for
    phases = run(step, Running.ABORT)
    assert phases is not None
    assert (core.state, step.live, step.previous) == ("on", NEW, None)


def test_half_an_update_in_place_is_not_served(core: ScriptedCore, step: Committer) -> None:
    step.give_up("update u1", writing=True)
    assert (core.told, step.poisoned) == ([], None), "it did not stand still"
    step.hold(Running.KEEP)
    step.wrote()
    step.give_up("update u1", writing=False)
    assert (core.state, core.refusing) == ("paused", True)
    assert step.poisoned == "update u1 ended half-way, in place"
    step.hold(Running.KEEP)
    step.give_up("update u2", writing=False)  # what was to heal it wrote nothing
    assert (core.state, core.refusing) == ("paused", True)
    assert step.poisoned == "update u1 ended half-way, in place"
    step.hold(Running.KEEP)  # a full update heals it
    run(step)
    assert (core.state, core.refusing, step.poisoned) == ("on", False, None)


def test_an_update_in_place_that_wrote_nothing_can_be_given_up(core: ScriptedCore, step: Committer) -> None:
    step.hold(Running.KEEP)
    step.wrote()
    run(step)
    step.hold(Running.KEEP)
    step.give_up("update u2", writing=False)
    assert (core.state, step.poisoned, step.held) == ("on", None, False)
    step.hold(Running.KEEP)
    step.give_up("update u3", writing=True)
    assert step.poisoned == "update u3 ended half-way, in place"


def test_nothing_is_written_in_place_while_somebody_else_has_paused(
    core: ScriptedCore, step: Committer
) -> None:
    core.state = "asleep"
    with pytest.raises(UpdateError) as caught:
        step.require_running()
    assert caught.value.kind == "paused"


@pytest.mark.parametrize("text", ["a\u202eb", "a\u2066b", "a\u200fb", "a\x1bb", "a\nb", "a\udc80b"])
def test_a_version_moves_nothing_in_the_log(
    step: Committer, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    """Marks of writing direction would show the rest of the line in another order."""
    caplog.set_level("INFO", "vllm.fp8ext")
    run(step, label=NEW._replace(version=text))
    assert text.encode("unicode_escape").decode() in caplog.text
    assert text[1] not in caplog.messages[-1]
    with contextlib.suppress(UpdateError):
        step.poison(f"update of {text}")
    assert text.encode("unicode_escape").decode() in caplog.messages[-1]
    assert text[1] not in caplog.messages[-1]


def test_an_engine_that_is_told_so_is_current(core: ScriptedCore, step: Committer) -> None:
    step.await_weights(NOT_CURRENT)
    assert core.told == ["stop", "refuse"]
    step.declare_current(0, "step-7")
    assert core.told == ["stop", "refuse", "relabel 0 step-7", "accept", "resume"]
    assert (step.poisoned, step.live.version, core.refusing) == (None, "step-7", False)
    step.declare_current(0, "step-7")
    step.declare_current(0, None)
    assert len(core.told) == 5


@pytest.mark.parametrize(
    ("reason", "epoch", "version", "kind"),
    [
        (NOT_CURRENT, 1, None, "stale-base"),
        (None, 1, None, "stale-base"),
        (None, 0, "step-7", "wrong-state"),
        (NO_WEIGHTS, 0, None, "no-weights"),
        (NO_CURRENT_WEIGHTS, 0, None, "no-weights"),
        ("half of it", 0, None, "poisoned"),
    ],
)
def test_an_engine_that_is_not_what_is_said_does_not_become_current(
    core: ScriptedCore, step: Committer, reason: str | None, epoch: int, version: str | None, kind: str
) -> None:
    if reason is not None:
        step.await_weights(reason)
    before = list(core.told)
    with pytest.raises(UpdateError) as caught:
        step.declare_current(epoch, version)
    assert (caught.value.kind, step.poisoned, step.live, core.told) == (kind, reason, BEFORE, before)


@pytest.mark.parametrize("reason", [NOT_CURRENT, NO_WEIGHTS, NO_CURRENT_WEIGHTS, "half of it"])
@pytest.mark.parametrize("becomes_current", [True, False])
def test_a_full_update_makes_current_unless_word_is_awaited(
    core: ScriptedCore, step: Committer, reason: str, becomes_current: bool
) -> None:
    step.await_weights(reason)
    step.run("u1", NEW, Running.KEEP, 1e6, becomes_current=becomes_current)
    assert core.swapped == [True, True]
    assert (step.live, step.previous) == (NEW, None)
    assert step.poisoned == (None if becomes_current else NOT_CURRENT)
    assert core.refusing != becomes_current
    assert core.state == ("on" if becomes_current else "paused")
    if not becomes_current:
        step.declare_current(1, None)
        assert (core.refusing, core.state) == (False, "on")


def test_a_partial_update_does_not_make_current(step: Committer) -> None:
    step.await_weights(NOT_CURRENT)
    with pytest.raises(UpdateError, match="expected a full update, or word") as caught:
        step.require_healing(partial=True)
    assert caught.value.kind == "not-current"
