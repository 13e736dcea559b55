# SPDX-License-Identifier: Apache-2.0
"""Any sequence of calls of a session against a small model."""

from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from .sessions import (
    LIFETIME,
    NAMES,
    OPENED,
    opened,
    refused,
    specs,
)


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
        """The canary, begun when everything was here, has ended; chunks may have arrived since."""
        if self.checked is None:
            return
        arrivals, revision = self.checked
        kind = self.over if not self.takes else "staging" if arrivals != self.arrivals else None
        self.expect(kind, lambda: self.session.prepared(revision))
        if kind is None:
            self.state = "prepared"

    @rule(key=st.sampled_from("012"), late=st.booleans())
    def finish_canary(self, key: str, late: bool) -> None:
        """As a client would finish an update; `late`: a chunk comes, and is staged, while the canary runs."""
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
