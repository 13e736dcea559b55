# SPDX-License-Identifier: Apache-2.0
"""One update's state machine: each transition, and any sequence of calls against a small model."""

from collections.abc import Callable
from typing import Any

import pytest

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract.claims import Claim
from vllm_fp8ext.update.contract.manifest import Manifest, TensorSpec
from vllm_fp8ext.update.contract.shard_slice import ShardSlice
from vllm_fp8ext.update.engine.session import Running, Session, State
from vllm_fp8ext.update.engine.timestamp import Moment

from .sessions import (
    CANARY,
    ENDED,
    LIFETIME,
    MANIFEST,
    NAMES,
    OPENED,
    abandoned,
    committed,
    committing,
    expired,
    opened,
    prepare,
    prepared,
    refused,
    send,
    specs,
)

FUSED = Manifest(
    MANIFEST.tensors,
    MANIFEST.ignored,
    {
        name: (ShardSlice(rank, target, (8, 2), ((0, 4), (0, 2)), (0, 0), False, "bfloat16"),)
        for name, rank, target in (("a", 1, "ab"), ("b", 1, "ab"), ("c", 0, "c"), ("d", 0, "d"))
    },
    "fp32",
    2,
)
"""`a` and `b` lie in one parameter of the second rank."""


def partly(**more: Any) -> Session:
    return Session(
        "u1", "step-9", Running.KEEP, FUSED, OPENED, LIFETIME, CANARY, base_epoch=0, partial=True, **more
    )


def test_of_many_missing_tensors_some_are_listed_and_all_are_counted() -> None:
    names = [f"w{number:03}" for number in range(150)]
    manifest = Manifest(
        {name: TensorSpec(name, (4, 2), "bfloat16") for name in reversed(names)}, frozenset(), {}, "fp32", 1
    )
    session = Session("u1", "step-9", Running.KEEP, manifest, OPENED, LIFETIME, CANARY)
    send(session, "0", names[:7])
    told = session.describe().as_dict()
    assert (told["tensors_required"], told["tensors_missing"]) == (150, 143)
    assert told["missing"] == names[7:107]
    assert refused(lambda: session.check(0)).details["missing"] == names[7:]


def test_chunks_without_tensors_are_not_told_of() -> None:
    """Any number of them may come."""
    session = opened()
    for number in range(3):
        send(session, str(number), ())
    send(session, "3", NAMES)
    assert list(session.describe().as_dict()["chunks"]) == ["3"]
    send(session, "3", ())
    assert session.describe().as_dict()["chunks"] == {}
    assert session.missing() == set(NAMES)


def test_a_partial_update_needs_whole_parameters() -> None:
    session = partly()
    assert sorted(session.missing()) == []
    error = refused(lambda: session.check(0))
    assert (error.kind, error.status, str(error)) == ("incomplete", 422, "the update brings nothing")
    send(session, "0", "a")
    assert sorted(session.missing()) == ["b"]
    assert refused(lambda: session.check(0)).details["missing"] == ["b"]
    send(session, "1", "b")
    assert (session.describe().as_dict()["tensors_required"], sorted(session.missing())) == (2, [])
    prepare(session)
    assert session.state is State.PREPARED


def test_a_partial_update_needs_what_was_announced() -> None:
    session = partly(claims={"c": Claim(), "tied": Claim()})
    assert sorted(session.missing()) == ["c"]
    send(session, "0", "d")
    assert sorted(session.missing()) == ["c"]
    send(session, "1", "c")
    prepare(session)


@pytest.mark.parametrize("key", ["1", "2"])
def test_a_refused_chunk_of_a_partial_update_is_not_left_out(key: str) -> None:
    session = partly()
    send(session, "0", "c")
    session.receive("1", specs("d"), 10)
    session.staged("1", [{"kind": "non-finite", "tensor": "d"}])
    error = refused(lambda: session.check(0))
    assert error.details == {
        "missing": ["d"],
        "problems": [{"kind": "non-finite", "tensor": "d"}],
        "problem_count": 1,
    }
    send(session, key, "d")
    prepare(session)


def test_in_place_what_a_chunk_brought_must_be_brought_again() -> None:
    """It has been overwritten: another chunk under the same key does not undo that."""
    session = partly()
    session.inplace = True
    send(session, "0", "a")
    send(session, "0", "c")
    assert sorted(session.missing()) == ["a", "b"]
    send(session, "1", "ab")
    assert sorted(session.missing()) == []
    session.receive("2", specs("d"), 10)
    session.staged("2", [{"kind": "non-finite", "tensor": "d"}])
    session.receive("2", specs(["tied"]), 10)
    session.staged("2", [])
    assert sorted(session.missing()) == ["d"]


def test_the_way_through() -> None:
    session = opened()
    assert (session.state, session.live) == (State.OPEN, True)
    send(session, "0", "ab")
    send(session, "1", "cd")
    prepare(session)
    assert (session.state, session.live) == (State.PREPARED, True)
    session.exchanged()
    assert (session.state, session.live, session.result) == (State.COMMITTING, True, None)
    session.commit({"epoch": 1})
    assert (session.state, session.live) == (State.COMMITTED, False)
    assert session.result == {"epoch": 1}


TAKES_NOTHING = {committing: ("wrong-state", 409), **ENDED}


@pytest.mark.parametrize("make", TAKES_NOTHING, ids=lambda make: make.__name__)
@pytest.mark.parametrize(
    "call",
    [
        lambda session: session.receive("0", specs("a"), 1),
        lambda session: session.check(0),
        lambda session: session.prepared(session.revision),
        lambda session: session.exchanged(),
        lambda session: session.withdraw(["0"], {}),
    ],
    ids=["receive", "check", "prepared", "commit", "withdraw"],
)
def test_an_update_that_is_served_or_has_ended_takes_no_call(
    make: Callable[[], Session], call: Callable[[Session], object]
) -> None:
    session = make()
    before = session.describe().as_dict()
    error = refused(lambda: call(session))
    assert (error.kind, error.status) == TAKES_NOTHING[make]
    assert str(session.state) in str(error)
    assert session.describe().as_dict() == before


def test_an_open_update_is_not_committed() -> None:
    error = refused(opened().exchanged)
    assert (error.kind, error.status) == ("not-prepared", 409)
    assert "prepare it first" in str(error)


@pytest.mark.parametrize(("make", "why"), [(committing, "it is committing"), (committed, "roll back")])
def test_what_is_served_is_not_abandoned(make: Callable[[], Session], why: str) -> None:
    session = make()
    before = session.describe().as_dict()
    error = refused(session.abandon)
    assert error.kind == "wrong-state"
    assert why in str(error)
    assert session.describe().as_dict() == before


def test_a_commit_that_is_being_confirmed_does_not_expire() -> None:
    session = committing()
    assert not session.expire(OPENED.later(10 * LIFETIME))
    assert session.state is State.COMMITTING


@pytest.mark.parametrize("make", [opened, prepared], ids=lambda make: make.__name__)
def test_an_update_is_abandoned_once(make: Callable[[], Session]) -> None:
    session = make()
    assert session.abandon()
    assert not session.abandon()
    assert session.state is State.ABANDONED


def test_an_expired_update_is_not_abandoned_any_more() -> None:
    session = expired()
    assert not session.abandon()
    assert session.state is State.EXPIRED


def test_preparing_again_is_allowed() -> None:
    session = prepared()
    prepare(session)
    assert session.state is State.PREPARED


@pytest.mark.parametrize("done", [True, False], ids=["staged", "staging"])
def test_what_was_prepared_before_a_chunk_came_is_not_prepared(done: bool) -> None:
    """The canary takes a while; a chunk may arrive meanwhile, and even be staged."""
    session = opened()
    send(session, "0", NAMES)
    session.check(0)
    begun = session.revision
    session.receive("0", specs(NAMES), 10)
    if done:
        session.staged("0", [])
    assert refused(lambda: session.prepared(begun)).kind == "staging"
    assert session.state is State.OPEN


def test_what_was_withdrawn_is_sent_again() -> None:
    """Also after it was prepared; what was refused stays refused for its own reason."""
    changed = {"kind": "file-changed", "detail": "a/b was changed"}
    session = opened()
    first, *others = NAMES
    send(session, "0", [first])
    send(session, "1", others)
    prepare(session)
    revision = session.revision
    session.withdraw(["1", "no such"], changed)
    assert (session.state, session.missing(), session.problems) == (State.OPEN, set(others), [changed])
    with pytest.raises(UpdateError, match="a chunk arrived"):
        session.prepared(revision)
    session.receive("1", specs(others), 10)
    session.staged("1", [{"kind": "non-finite", "tensor": first}])
    session.withdraw(["1"], changed)
    assert session.problems == [{"kind": "non-finite", "tensor": first}]
    send(session, "1", others)
    prepare(session)
    assert not session.problems


def test_what_is_forgotten_is_sent_again() -> None:
    session = prepared()
    begun = session.revision
    session.forget()
    assert (session.state, sorted(session.missing()), session.bytes) == (State.OPEN, list(NAMES), 0)
    assert refused(lambda: session.prepared(begun)).kind == "staging"
    send(session, "0", NAMES)
    prepare(session)
    assert session.state is State.PREPARED


def test_what_heals_is_for_no_epoch_any_more() -> None:
    """The commit that failed half-way may have used one up."""
    session = opened(base_epoch=0)
    send(session, "0", NAMES)
    prepare(session)
    assert refused(lambda: session.check_base(1)).kind == "stale-base"
    session.forget()
    send(session, "0", NAMES)
    prepare(session, epoch=1)
    assert session.state is State.PREPARED


def test_a_chunk_reopens_a_prepared_update() -> None:
    session = prepared()
    session.receive("0", specs(NAMES), 10)
    assert session.state is State.OPEN
    assert refused(lambda: prepare(session)).kind == "staging"
    assert refused(session.exchanged).kind == "not-prepared"
    session.staged("0", [])
    prepare(session)
    assert session.state is State.PREPARED


def test_a_refused_chunk_leaves_a_prepared_update_prepared() -> None:
    session = prepared()
    refused(lambda: session.receive("1", specs(["stranger"]), 10))
    assert session.state is State.PREPARED


@pytest.mark.parametrize(
    ("base", "epoch", "stale"), [(None, 3, False), (3, 3, False), (2, 3, True), (0, 1, True)]
)
def test_an_update_for_other_weights_is_refused(base: int | None, epoch: int, stale: bool) -> None:
    session = opened(base)
    send(session, "0", NAMES)
    if not stale:
        session.check_base(epoch)
        prepare(session, epoch)
        return
    for call in (session.check_base, session.check):
        error = refused(lambda call=call: call(epoch))
        assert (error.kind, error.status) == ("stale-base", 409)
        assert error.details == {"expected": base, "found": epoch}
    assert session.state is State.OPEN


def test_weights_that_changed_after_prepare_are_noticed() -> None:
    session = opened(0)
    send(session, "0", NAMES)
    prepare(session)
    assert refused(lambda: session.check(1)).kind == "stale-base"


@pytest.mark.parametrize("make", [opened, prepared], ids=lambda make: make.__name__)
def test_an_update_expires_when_nothing_comes_for_its_lifetime(make: Callable[[], Session]) -> None:
    session = make()
    assert not session.expire(OPENED.later(LIFETIME - 1))
    session.touch(OPENED.later(30))
    assert not session.expire(OPENED.later(LIFETIME))
    assert session.expire(OPENED.later(LIFETIME + 30))
    assert not session.expire(OPENED.later(LIFETIME + 31)), "it ended before"
    assert session.state is State.EXPIRED


@pytest.mark.parametrize("set_by", [-1e6, 1e6])
def test_a_clock_that_is_set_meanwhile_ends_no_update(set_by: float) -> None:
    session = opened()
    set_clock = Moment(OPENED.monotonic + LIFETIME - 1, OPENED.unix + set_by)
    assert not session.expire(set_clock)
    session.touch(set_clock)
    assert session.describe().as_dict()["expires_at"] == set_clock.unix + LIFETIME
    assert session.expire(set_clock.later(LIFETIME))


def test_an_update_whose_chunk_is_being_staged_does_not_expire() -> None:
    session = opened()
    session.receive("0", specs("a"), 10)
    assert not session.expire(OPENED.later(10 * LIFETIME))
    session.staged("0", [])
    assert session.expire(OPENED.later(10 * LIFETIME))


@pytest.mark.parametrize("make", [committed, abandoned], ids=lambda make: make.__name__)
def test_an_ended_update_does_not_expire(make: Callable[[], Session]) -> None:
    session = make()
    state = session.state
    assert not session.expire(OPENED.later(10 * LIFETIME))
    assert session.state is state
