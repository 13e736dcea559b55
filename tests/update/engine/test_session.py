# SPDX-License-Identifier: Apache-2.0
"""One update's state machine: each transition, and any sequence of calls against a small model."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract.canary import Canary
from vllm_fp8ext.update.contract.claims import Claim
from vllm_fp8ext.update.contract.manifest import Manifest, ShardSlice, TensorSpec
from vllm_fp8ext.update.contract.update_errors import refusal
from vllm_fp8ext.update.engine.session import Running, Session, State
from vllm_fp8ext.update.engine.timestamp import Moment

NAMES = ("a", "b", "c", "d")
OPENED = Moment(50.0, 1000.0)
LIFETIME = 60.0
CANARY = Canary([[1]], built_in=True)
MANIFEST = Manifest(
    {name: TensorSpec(name, (4, 2), "bfloat16") for name in NAMES}, frozenset({"tied"}), {}, "fp32", 1
)


def specs(names: Iterable[str]) -> list[TensorSpec]:
    return [TensorSpec(name, (4, 2), "bfloat16") for name in names]


def opened(base_epoch: int | None = None, claims: Mapping[str, Claim] | None = None) -> Session:
    return Session(
        "u1",
        "step-9",
        Running.KEEP,
        MANIFEST,
        OPENED,
        LIFETIME,
        CANARY,
        base_epoch=base_epoch,
        claims=claims or {},
    )


def send(session: Session, key: str, names: Iterable[str], size: int = 10) -> None:
    session.receive(key, specs(names), size)
    session.staged(key, [])


def prepare(session: Session, epoch: int = 0) -> None:
    session.check(epoch)
    session.prepared(session.revision)


def prepared() -> Session:
    session = opened()
    send(session, "0", NAMES)
    prepare(session)
    return session


def committing() -> Session:
    session = prepared()
    session.exchanged()
    return session


def committed() -> Session:
    session = committing()
    session.commit({"epoch": 1})
    return session


def abandoned() -> Session:
    session = opened()
    session.abandon()
    return session


def expired() -> Session:
    session = opened()
    assert session.expire(OPENED.later(LIFETIME))
    return session


def refused(call: Callable[[], object]) -> UpdateError:
    with pytest.raises(UpdateError) as caught:
        call()
    return caught.value


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


# --- what is missing


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


# --- partial updates


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


# --- transitions


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


ENDED = {committed: ("wrong-state", 409), abandoned: ("wrong-state", 409), expired: ("expired", 410)}
TAKES_NOTHING = {committing: ("wrong-state", 409), **ENDED}
ended = pytest.mark.parametrize("make", ENDED, ids=lambda make: make.__name__)


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


# --- base


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


# --- time


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


# --- chunks


def test_everything_wrong_with_a_chunk_is_in_one_error() -> None:
    session = opened()
    send(session, "0", "ab")
    brought = [
        *specs(["a", "stranger", "tied"]),
        TensorSpec("c", (4, 3), "bfloat16"),
        TensorSpec("d", (4, 2), "int8"),
    ]
    before = session.describe().as_dict()
    error = refused(lambda: session.receive("1", brought, 10))
    assert (error.kind, error.status) == ("invalid-tensors", 422)
    assert [(problem["kind"], problem["tensor"]) for problem in error.details["problems"]] == [
        ("unknown-tensor", "stranger"),
        ("wrong-shape", "c"),
        ("wrong-dtype", "d"),
        ("duplicate-tensor", "a"),
    ]
    assert all(name in str(error) for name in ("stranger", "c", "d", "a"))
    assert session.describe().as_dict() == before


def test_problems_of_one_kind_give_the_error_its_kind() -> None:
    error = refused(lambda: opened().receive("0", specs(f"stranger{n}" for n in range(12)), 10))
    assert error.kind == "unknown-tensor"
    assert len(error.details["problems"]) == 12
    assert str(error).startswith("12 problems: ")
    assert str(error).endswith("and 4 more")


def test_what_differs_from_its_claim_is_refused_and_told_once() -> None:
    """A tensor that differs from the manifest and from its claim in the same way has one problem."""
    claims = {"a": Claim((4, 2), "float16"), "b": Claim((2, 4)), "c": Claim(sha256="0" * 64)}
    session = opened(claims=claims)
    brought = [TensorSpec("b", (4, 1), "bfloat16"), *specs("ac")]
    error = refused(lambda: session.receive("0", brought, 10))
    found = [(p["kind"], p["tensor"], p["expected"]) for p in error.details["problems"]]
    assert found == [("wrong-shape", "b", [4, 2]), ("wrong-dtype", "a", "float16")]
    session.receive("0", [TensorSpec("a", (4, 2), "float16"), *specs("c")], 10)


def test_a_tensor_belongs_to_one_chunk() -> None:
    session = opened()
    session.receive("0", specs("ab"), 10)
    error = refused(lambda: session.receive("1", specs("bc"), 10))
    assert error.kind == "duplicate-tensor"
    assert error.details["problems"] == [{"kind": "duplicate-tensor", "tensor": "b", "chunk": "0"}]


def test_ignored_tensors_may_come_often() -> None:
    session = opened()
    send(session, "0", ["a", "b", "tied"])
    send(session, "1", ["c", "d", "tied"])
    prepare(session)


def test_a_chunk_is_replaced_as_a_whole() -> None:
    """What the first version brought and the second does not is missing again; nothing is a duplicate of
    it."""
    session = opened()
    send(session, "0", "abc", 30)
    send(session, "0", "a", 10)
    assert sorted(session.missing()) == ["b", "c", "d"]
    send(session, "1", "bcd", 25)
    assert sorted(session.missing()) == []
    assert session.describe().as_dict()["bytes"] == 35


def test_a_chunk_that_is_being_staged_is_not_replaced() -> None:
    session = opened()
    session.receive("0", specs("a"), 10)
    error = refused(lambda: session.receive("0", specs("a"), 10))
    assert (error.kind, error.status) == ("chunk-busy", 409)
    session.staged("0", [])
    session.receive("0", specs("a"), 10)


def test_a_replacement_counts_only_once_it_is_staged() -> None:
    session = prepared()
    session.receive("0", specs(NAMES), 10)
    assert sorted(session.missing()) == list(NAMES)
    assert session.describe().as_dict()["bytes"] == 0


def test_a_refused_chunk_counts_as_missing() -> None:
    session = opened()
    send(session, "0", "ab")
    session.receive("1", specs("cd"), 10)
    problem = {"kind": "non-finite", "tensor": "c"}
    session.staged("1", [problem])
    assert sorted(session.missing()) == ["c", "d"]
    error = refused(lambda: prepare(session))
    assert (error.kind, error.status) == ("incomplete", 422)
    assert error.details == {"missing": ["c", "d"], "problems": [problem], "problem_count": 1}
    assert session.describe().as_dict()["problems"] == [problem]


@pytest.mark.parametrize("key", ["1", "2"])
def test_a_refused_chunk_is_sent_again_under_its_own_or_another_key(key: str) -> None:
    session = opened()
    send(session, "0", "ab")
    session.receive("1", specs("cd"), 10)
    session.staged("1", [{"kind": "non-finite", "tensor": "c"}])
    send(session, key, "cd")
    prepare(session)
    assert session.state is State.PREPARED


def test_every_missing_tensor_is_listed() -> None:
    error = refused(lambda: opened().check(0))
    assert error.kind == "incomplete"
    assert error.details["missing"] == list(NAMES)
    assert "lacks 4 of 4 tensors: a, b, c, d" in str(error)


def test_preparing_waits_for_chunks_that_are_being_staged() -> None:
    session = opened()
    send(session, "0", NAMES)
    session.receive("1", specs(["tied"]), 10)
    error = refused(lambda: prepare(session))
    assert (error.kind, error.status) == ("staging", 409)


def test_what_is_told_about_an_update() -> None:
    session = Session(
        "u1", "step-9", Running.RECOMPUTE, MANIFEST, Moment(7.0, 123.0), 60.0, CANARY, base_epoch=4
    )
    send(session, "0", "ab", 30)
    session.receive("1", specs("c"), 15, "ab" * 32)
    assert session.describe().as_dict() == {
        "partial": False,
        "world_size": 1,
        "id": "u1",
        "state": "open",
        "version": "step-9",
        "running": "recompute",
        "base_epoch": 4,
        "opened_at": 123.0,
        "expires_at": 183.0,
        "tensors_required": 4,
        "tensors_missing": 2,
        "missing": ["c", "d"],
        "bytes": 30,
        "chunks": {
            "0": {"staged": True, "busy": False, "bytes": 30, "tensors": 2, "sha256": None},
            "1": {"staged": False, "busy": True, "bytes": 15, "tensors": 1, "sha256": "ab" * 32},
        },
        "problems": [],
        "problem_count": 0,
        "seconds": {},
        "quantization_error": None,
        "canary_perplexity": None,
        "kv_scales": None,
        "result": None,
    }


@ended
def test_an_ended_update_misses_nothing_and_has_no_time_left(make: Callable[[], Session]) -> None:
    told = make().describe().as_dict()
    assert (told["tensors_missing"], told["missing"], told["expires_at"]) == (0, [], None)


def test_the_quantization_error_is_relative() -> None:
    """A tensor without a norm (not quantized, or all zeros) has none; a chunk that comes again brings its own."""
    session = opened()
    session.receive("0", specs("ab"), 10)
    session.staged("0", [], {"a": (9.0, 100.0), "b": (0.0, 0.0)})
    session.receive("1", specs("c"), 10)
    session.staged("1", [], {"c": (1000.0, 1.0)})
    session.receive("1", specs("c"), 10)
    session.staged("1", [], {"c": (16.0, 300.0)})
    found = session.quantization_error
    assert found is not None
    assert found["relative"] == pytest.approx((25 / 400) ** 0.5)
    assert found["mean"] == pytest.approx((0.3 + (16 / 300) ** 0.5) / 2)
    assert (found["max"], found["worst"]) == (pytest.approx(0.3), "a")


def test_without_quantized_tensors_there_is_no_quantization_error() -> None:
    session = opened()
    session.receive("0", specs("a"), 10)
    session.staged("0", [], {"a": (0.0, 0.0)})
    assert session.quantization_error is None


def test_refusals_carry_all_problems() -> None:
    problems = [{"kind": "wrong-shape", "tensor": "a", "expected": [1], "found": [2]}]
    error = refusal(problems)
    assert (error.kind, error.status) == ("wrong-shape", 422)
    assert error.details == {"problems": problems, "problem_count": 1}
    assert str(error) == "1 problem: wrong-shape: tensor a expected [1] found [2]"


# --- any sequence of calls


class AnySequence(RuleBasedStateMachine):
    """A session against a model: a state, a clock, and for each chunk what became of it, its names and its size."""

    keys = Bundle("keys")

    def __init__(self) -> None:
        super().__init__()
        self.session = opened(base_epoch=1)
        self.state = "open"
        self.now = OPENED
        self.last = OPENED
        self.chunks: dict[str, tuple[str, frozenset[str], int]] = {}
        self.arrivals = 0
        self.healing = False
        self.checked: tuple[int, int] | None = None
        """Arrivals, and the session's own revision, when everything was found to be here."""

    @property
    def live(self) -> bool:
        return self.state in ("open", "prepared", "committing")

    @property
    def takes(self) -> bool:
        """Whether a client can do anything to it."""
        return self.state in ("open", "prepared")

    @property
    def over(self) -> str:
        """The refusal of an update that takes nothing."""
        return "expired" if self.state == "expired" else "wrong-state"

    @property
    def staging(self) -> bool:
        return any(status == "staging" for status, _, _ in self.chunks.values())

    def have(self) -> set[str]:
        return {name for status, names, _ in self.chunks.values() if status == "staged" for name in names}

    def others(self, key: str) -> set[str]:
        return {name for other, (_, names, _) in self.chunks.items() if other != key for name in names}

    def expect(self, kind: str | None, call: Callable[[], object]) -> None:
        """The call succeeds when `kind` is None, otherwise it is refused with this kind and changes nothing."""
        if kind is None:
            call()
            return
        before = self.session.describe().as_dict()
        assert refused(call).kind == kind
        assert self.session.describe().as_dict() == before

    @rule(
        target=keys,
        key=st.sampled_from("012"),
        names=st.frozensets(st.sampled_from((*NAMES, "tied"))),
        size=st.integers(0, 99),
    )
    def receive(self, key: str, names: frozenset[str], size: int) -> str:
        if not self.takes:
            kind = self.over
        elif self.chunks.get(key, ("",))[0] == "staging":
            kind = "chunk-busy"
        elif names & self.others(key) - {"tied"}:
            kind = "duplicate-tensor"
        else:
            kind = None
        self.expect(kind, lambda: self.session.receive(key, specs(names), size))
        if kind is None:
            self.state = "open"
            self.arrivals += 1
            self.chunks[key] = "staging", names, size
        return key

    @rule(key=keys, good=st.booleans())
    def staged(self, key: str, good: bool) -> None:
        """Also after the update has ended: the ranks do not know."""
        status, names, size = self.chunks.get(key, ("", frozenset(), 0))
        if status == "staging":
            self.session.staged(key, [] if good else [{"kind": "non-finite", "tensor": "a"}])
            self.chunks[key] = ("staged", names, size) if good else ("refused", frozenset(), size)

    @rule(target=keys, key=st.sampled_from("012"))
    def fill(self, key: str) -> str:
        """A chunk of all that the others leave, as a client would send it."""
        for other in self.chunks:
            self.staged(other, good=True)
        self.receive(key, frozenset({*NAMES, "tied"} - self.others(key) | {"tied"}), 7)
        self.staged(key, good=True)
        return key

    @rule(epoch=st.sampled_from((1, 1, 1, 2)))
    def check(self, epoch: int) -> None:
        if not self.takes:
            kind = self.over
        elif epoch != 1 and not self.healing:
            kind = "stale-base"
        elif self.staging:
            kind = "staging"
        elif set(NAMES) - self.have():
            kind = "incomplete"
        else:
            kind = None
        self.expect(kind, lambda: self.session.check(epoch))
        if kind is None:
            self.checked = self.arrivals, self.session.revision

    @rule()
    def prepared(self) -> None:
        """The canary, begun when everything was here, has sung; chunks may have arrived since."""
        if self.checked is None:
            return
        arrivals, revision = self.checked
        kind = self.over if not self.takes else "staging" if arrivals != self.arrivals else None
        self.expect(kind, lambda: self.session.prepared(revision))
        if kind is None:
            self.state = "prepared"

    @rule(key=st.sampled_from("012"), late=st.booleans())
    def sing(self, key: str, late: bool) -> None:
        """As a client would finish an update; `late`: a chunk comes, and is staged, while the canary sings."""
        self.fill(key)
        self.check(1)
        if late:
            self.fill(key)
        self.prepared()

    @rule()
    def exchanged(self) -> None:
        kind = None if self.state == "prepared" else "not-prepared" if self.state == "open" else self.over
        self.expect(kind, self.session.exchanged)
        if kind is None:
            assert self.have() >= set(NAMES)
            assert self.checked is not None
            assert self.checked[0] == self.arrivals
            self.state = "committing"

    @precondition(lambda self: self.state == "committing")
    @rule()
    def commit(self) -> None:
        self.session.commit({"epoch": 2})
        self.state = "committed"

    @precondition(lambda self: self.state in ("prepared", "committing"))
    @rule()
    def forget(self) -> None:
        """The commit failed half-way, or a rank serves something else."""
        self.session.forget()
        self.healing = True
        self.chunks.clear()
        self.arrivals += 1
        self.state = "open"
        self.prepared()

    @rule(really=st.sampled_from((True, False, False, False)))
    def abandon(self, really: bool) -> None:
        if not really:
            return
        if self.state in ("committing", "committed"):
            self.expect("wrong-state", self.session.abandon)
            return
        assert self.session.abandon() == self.live
        self.state = "abandoned" if self.live else self.state

    @rule()
    def touch(self) -> None:
        self.session.touch(self.now)
        self.last = self.now

    @rule(seconds=st.sampled_from((0.0, 10.0, 59.0, 60.0)))
    def expire(self, seconds: float) -> None:
        self.now = self.now.later(seconds)
        ends = self.takes and not self.staging and self.now.monotonic - self.last.monotonic >= LIFETIME
        assert self.session.expire(self.now) == ends
        self.state = "expired" if ends else self.state

    @invariant()
    def agrees(self) -> None:
        told = self.session.describe().as_dict()
        assert told["state"] == self.state
        assert self.session.live == self.live
        assert set(self.session.missing()) == set(NAMES) - self.have()
        assert told["bytes"] == sum(size for status, _, size in self.chunks.values() if status == "staged")
        assert told["expires_at"] == (self.last.later(LIFETIME).unix if self.live else None)
        assert len(told["problems"]) == sum(status == "refused" for status, _, _ in self.chunks.values())


TestAnySequence = AnySequence.TestCase
TestAnySequence.settings = settings(max_examples=250, stateful_step_count=40)
