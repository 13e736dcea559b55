# SPDX-License-Identifier: Apache-2.0
"""One update's state machine: each transition, and any sequence of calls against a small model."""

from collections.abc import Callable, Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.weights.manifest import Manifest, TensorSpec
from vllm_fp8ext.weights.session import Running, Session, State, refusal

NAMES = ("a", "b", "c", "d")
MANIFEST = Manifest(
    {name: TensorSpec(name, (4, 2), "bfloat16") for name in NAMES}, frozenset({"tied"}), {}, "fp32", 1
)


def specs(names: Iterable[str]) -> list[TensorSpec]:
    return [TensorSpec(name, (4, 2), "bfloat16") for name in names]


def opened(base_epoch: int | None = None) -> Session:
    return Session("u1", "step-9", Running.KEEP, MANIFEST, base_epoch)


def send(session: Session, key: str, names: Iterable[str], size: int = 10) -> None:
    session.receive(key, specs(names), size)
    session.staged(key, [])


def prepared() -> Session:
    session = opened()
    send(session, "0", NAMES)
    session.prepare(0)
    return session


def committed() -> Session:
    session = prepared()
    session.commit({"epoch": 1})
    return session


def abandoned() -> Session:
    session = opened()
    session.abandon()
    return session


def refused(call: Callable[[], object]) -> UpdateError:
    with pytest.raises(UpdateError) as caught:
        call()
    return caught.value


# --- transitions


def test_the_way_through() -> None:
    session = opened()
    assert (session.state, session.live) == (State.OPEN, True)
    send(session, "0", "ab")
    send(session, "1", "cd")
    session.prepare(0)
    assert (session.state, session.live) == (State.PREPARED, True)
    session.commit({"epoch": 1})
    assert (session.state, session.live) == (State.COMMITTED, False)
    assert session.result == {"epoch": 1}


@pytest.mark.parametrize("make", [opened, committed, abandoned], ids=lambda make: make.__name__)
def test_only_a_prepared_update_is_committed(make: Callable[[], Session]) -> None:
    session = make()
    before = session.as_dict()
    error = refused(lambda: session.commit({"epoch": 7}))
    assert (error.kind, error.status) == ("wrong-state", 409)
    assert str(session.state) in str(error)
    assert session.as_dict() == before


@pytest.mark.parametrize("make", [committed, abandoned], ids=lambda make: make.__name__)
def test_an_ended_update_takes_no_chunk(make: Callable[[], Session]) -> None:
    session = make()
    before = session.as_dict()
    assert refused(lambda: session.receive("0", specs("a"), 1)).kind == "wrong-state"
    assert session.as_dict() == before


def test_an_abandoned_update_is_not_prepared() -> None:
    assert refused(lambda: abandoned().prepare(0)).kind == "wrong-state"


def test_a_committed_update_is_not_abandoned() -> None:
    session = committed()
    error = refused(session.abandon)
    assert error.kind == "wrong-state"
    assert "roll back" in str(error)
    assert session.state is State.COMMITTED


@pytest.mark.parametrize("make", [opened, prepared, abandoned], ids=lambda make: make.__name__)
def test_abandoning_is_idempotent(make: Callable[[], Session]) -> None:
    session = make()
    session.abandon()
    session.abandon()
    assert session.state is State.ABANDONED


def test_preparing_is_idempotent_before_and_after_the_commit() -> None:
    session = prepared()
    session.prepare(0)
    assert session.state is State.PREPARED
    session.commit({"epoch": 1})
    session.prepare(99)
    assert session.state is State.COMMITTED


def test_a_chunk_reopens_a_prepared_update() -> None:
    session = prepared()
    session.receive("0", specs(NAMES), 10)
    assert session.state is State.OPEN
    assert refused(lambda: session.prepare(0)).kind == "staging"
    assert refused(lambda: session.commit({})).kind == "wrong-state"
    session.staged("0", [])
    session.prepare(0)
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
        session.prepare(epoch)
        return
    for call in (session.check_base, session.prepare):
        error = refused(lambda call=call: call(epoch))
        assert (error.kind, error.status) == ("stale-base", 409)
        assert error.details == {"expected": base, "found": epoch}
    assert session.state is State.OPEN


def test_weights_that_changed_after_prepare_are_noticed() -> None:
    session = opened(0)
    send(session, "0", NAMES)
    session.prepare(0)
    assert refused(lambda: session.prepare(1)).kind == "stale-base"


# --- chunks


def test_everything_wrong_with_a_chunk_is_in_one_error() -> None:
    session = opened()
    send(session, "0", "ab")
    brought = [
        *specs(["a", "stranger", "tied"]),
        TensorSpec("c", (4, 3), "bfloat16"),
        TensorSpec("d", (4, 2), "int8"),
    ]
    before = session.as_dict()
    error = refused(lambda: session.receive("1", brought, 10))
    assert (error.kind, error.status) == ("invalid-tensors", 422)
    assert [(problem["kind"], problem["tensor"]) for problem in error.details["problems"]] == [
        ("unknown-tensor", "stranger"),
        ("wrong-shape", "c"),
        ("wrong-dtype", "d"),
        ("duplicate-tensor", "a"),
    ]
    assert all(name in str(error) for name in ("stranger", "c", "d", "a"))
    assert session.as_dict() == before


def test_problems_of_one_kind_give_the_error_its_kind() -> None:
    error = refused(lambda: opened().receive("0", specs(f"stranger{n}" for n in range(12)), 10))
    assert error.kind == "unknown-tensor"
    assert len(error.details["problems"]) == 12
    assert str(error).startswith("12 problems: ")
    assert str(error).endswith("and 4 more")


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
    session.prepare(0)


def test_a_chunk_is_replaced_as_a_whole() -> None:
    """What the first version brought and the second does not is missing again; nothing is a duplicate of
    it."""
    session = opened()
    send(session, "0", "abc", 30)
    send(session, "0", "a", 10)
    assert session.missing() == ["b", "c", "d"]
    send(session, "1", "bcd", 25)
    assert session.missing() == []
    assert session.as_dict()["bytes"] == 35


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
    assert session.missing() == list(NAMES)
    assert session.as_dict()["bytes"] == 0


def test_a_refused_chunk_counts_as_missing() -> None:
    session = opened()
    send(session, "0", "ab")
    session.receive("1", specs("cd"), 10)
    problem = {"kind": "non-finite", "tensor": "c"}
    session.staged("1", [problem])
    assert session.missing() == ["c", "d"]
    error = refused(lambda: session.prepare(0))
    assert (error.kind, error.status) == ("incomplete", 422)
    assert error.details == {"missing": ["c", "d"], "problems": [problem]}
    assert session.as_dict()["problems"] == [problem]


@pytest.mark.parametrize("key", ["1", "2"])
def test_a_refused_chunk_is_sent_again_under_its_own_or_another_key(key: str) -> None:
    session = opened()
    send(session, "0", "ab")
    session.receive("1", specs("cd"), 10)
    session.staged("1", [{"kind": "non-finite", "tensor": "c"}])
    send(session, key, "cd")
    session.prepare(0)
    assert session.state is State.PREPARED


def test_every_missing_tensor_is_listed() -> None:
    error = refused(lambda: opened().prepare(0))
    assert error.kind == "incomplete"
    assert error.details["missing"] == list(NAMES)
    assert "lacks 4 of 4 tensors: a, b, c, d" in str(error)


def test_preparing_waits_for_chunks_that_are_being_staged() -> None:
    session = opened()
    send(session, "0", NAMES)
    session.receive("1", specs(["tied"]), 10)
    error = refused(lambda: session.prepare(0))
    assert (error.kind, error.status) == ("staging", 409)


def test_what_is_told_about_an_update() -> None:
    session = Session("u1", "step-9", Running.RECOMPUTE, MANIFEST, 4, opened_at=123.0)
    send(session, "0", "ab", 30)
    session.receive("1", specs("c"), 15)
    assert session.as_dict() == {
        "id": "u1",
        "state": "open",
        "version": "step-9",
        "running": "recompute",
        "base_epoch": 4,
        "opened_at": 123.0,
        "tensors_required": 4,
        "tensors_missing": 2,
        "missing": ["c", "d"],
        "bytes": 30,
        "chunks": {
            "0": {"staged": True, "bytes": 30, "tensors": 2},
            "1": {"staged": False, "bytes": 15, "tensors": 1},
        },
        "problems": [],
        "seconds": {},
        "quantization_error": None,
        "result": None,
    }


@pytest.mark.parametrize("make", [committed, abandoned], ids=lambda make: make.__name__)
def test_an_ended_update_misses_nothing(make: Callable[[], Session]) -> None:
    assert make().as_dict()["tensors_missing"] == 0


def test_the_quantization_error_is_relative() -> None:
    session = opened()
    session.squared_error, session.squared_norm = 9.0, 144.0
    assert session.quantization_error == 0.25


def test_refusals_carry_all_problems() -> None:
    problems = [{"kind": "wrong-shape", "tensor": "a", "expected": [1], "found": [2]}]
    error = refusal(problems)
    assert (error.kind, error.status, error.details) == ("wrong-shape", 422, {"problems": problems})
    assert str(error) == "1 problems: wrong-shape: tensor a expected [1] found [2]"


# --- any sequence of calls


class AnySequence(RuleBasedStateMachine):
    """A session against a model: a state, and for each chunk its names and what became of it."""

    keys = Bundle("keys")

    def __init__(self) -> None:
        super().__init__()
        self.session = opened(base_epoch=1)
        self.state = "open"
        self.chunks: dict[str, tuple[str, frozenset[str]]] = {}

    @property
    def live(self) -> bool:
        return self.state in ("open", "prepared")

    def have(self) -> set[str]:
        return {name for status, names in self.chunks.values() if status == "staged" for name in names}

    def expect(self, kind: str | None, call: Callable[[], object]) -> None:
        """The call succeeds when `kind` is None, otherwise it is refused with this kind and changes
        nothing."""
        before = self.session.as_dict()
        if kind is None:
            call()
            return
        assert refused(call).kind == kind
        assert self.session.as_dict() == before

    @rule(target=keys, key=st.sampled_from("012"), names=st.frozensets(st.sampled_from((*NAMES, "tied"))))
    def receive(self, key: str, names: frozenset[str]) -> str:
        others = {name for other, (_, brought) in self.chunks.items() if other != key for name in brought}
        if not self.live:
            kind = "wrong-state"
        elif self.chunks.get(key, ("",))[0] == "staging":
            kind = "chunk-busy"
        elif names & others - {"tied"}:
            kind = "duplicate-tensor"
        else:
            kind = None
        self.expect(kind, lambda: self.session.receive(key, specs(names), len(names)))
        if kind is None:
            self.state = "open"
            self.chunks[key] = "staging", names
        return key

    @rule(key=keys, good=st.booleans())
    def staged(self, key: str, good: bool) -> None:
        status, names = self.chunks.get(key, ("", frozenset()))
        if status == "staging":
            self.session.staged(key, [] if good else [{"kind": "non-finite", "tensor": "a"}])
            self.chunks[key] = ("staged", names) if good else ("refused", frozenset())

    @rule(target=keys, key=st.sampled_from("012"))
    def fill(self, key: str) -> str:
        """A chunk of all that the others leave, as a client would send it."""
        for other in self.chunks:
            self.staged(other, good=True)
        others = {name for other, (_, brought) in self.chunks.items() if other != key for name in brought}
        self.receive(key, frozenset({*NAMES, "tied"} - others | {"tied"}))
        self.staged(key, good=True)
        return key

    @rule(epoch=st.sampled_from((1, 1, 1, 2)))
    def prepare(self, epoch: int) -> None:
        if self.state == "committed":
            kind = None
        elif not self.live:
            kind = "wrong-state"
        elif epoch != 1:
            kind = "stale-base"
        elif any(status == "staging" for status, _ in self.chunks.values()):
            kind = "staging"
        elif set(NAMES) - self.have():
            kind = "incomplete"
        else:
            kind = None
        self.expect(kind, lambda: self.session.prepare(epoch))
        if kind is None and self.live:
            self.state = "prepared"

    @rule()
    def commit(self) -> None:
        allowed = self.state == "prepared"
        self.expect(None if allowed else "wrong-state", lambda: self.session.commit({"epoch": 2}))
        if allowed:
            self.state = "committed"

    @rule(really=st.sampled_from((True, False, False, False)))
    def abandon(self, really: bool) -> None:
        if not really:
            return
        self.expect("wrong-state" if self.state == "committed" else None, self.session.abandon)
        if self.state != "committed":
            self.state = "abandoned"

    @invariant()
    def agrees(self) -> None:
        assert self.session.state == self.state
        assert set(self.session.missing()) == set(NAMES) - self.have()
        if self.state == "committed":
            assert self.have() >= set(NAMES)


TestAnySequence = AnySequence.TestCase
TestAnySequence.settings = settings(max_examples=100, stateful_step_count=20, deadline=None)
