# SPDX-License-Identifier: Apache-2.0
"""Work in slices: its turns, its ends, and that it never runs beside its caller."""

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_fp8ext.update.worker.cooperative_task import CooperativeTask, Pause


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "fp8ext-slices"]


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    yield
    for thread in workers():
        thread.join(60)
    assert workers() == []


def test_turns_alternate() -> None:
    events: list[str] = []

    def work(pause: Pause) -> dict[str, Any]:
        for index in range(3):
            events.append(f"work {index}")
            pause()
        return {"sum": 3}

    slices = CooperativeTask(work)
    assert events == [], "nothing runs before the first turn"
    for index in range(3):
        assert not slices.advance()
        assert slices.result is None
        events.append(f"caller {index}")
    assert slices.advance()
    assert slices.result == {"sum": 3}
    assert slices.slices == 4
    assert events == [f"{who} {index}" for index in range(3) for who in ("work", "caller")]


def test_work_that_never_pauses_is_done_in_one_turn() -> None:
    slices = CooperativeTask(lambda pause: {})
    assert slices.advance()
    assert slices.result == {}


def test_an_error_is_raised_where_the_turn_was_given() -> None:
    def work(pause: Pause) -> dict[str, Any]:
        pause()
        raise ValueError("no logits")

    slices = CooperativeTask(work)
    assert not slices.advance()
    with pytest.raises(ValueError, match="no logits"):
        slices.advance()
    assert slices.result is None


def test_what_is_over_is_told_again_without_another_turn() -> None:
    """A rank whose work is over is polled on as long as other ranks have work left."""
    turns: list[int] = []

    def good(pause: Pause) -> dict[str, Any]:
        turns.append(1)
        return {}

    def bad(pause: Pause) -> dict[str, Any]:
        turns.append(1)
        raise ValueError("no logits")

    done, failed = CooperativeTask(good), CooperativeTask(bad)
    for _ in range(3):
        assert done.advance()
        with pytest.raises(ValueError, match="no logits"):
            failed.advance()
    assert len(turns) == 2


@pytest.mark.parametrize("turns", [0, 1, 2, 3])
def test_closing_ends_the_thread(turns: int) -> None:
    """Before it began, in the middle, and after its end; what the work holds is released."""
    events: list[str] = []

    def work(pause: Pause) -> dict[str, Any]:
        try:
            pause()
            pause()
        finally:
            events.append("released")
        return {}

    slices = CooperativeTask(work)
    for _ in range(turns):
        slices.advance()
    slices.close()
    assert workers() == []
    assert events == (["released"] if turns else [])
    assert slices.result == ({} if turns == 3 else None)
    slices.close()


def test_work_that_catches_everything_is_closed_too() -> None:
    def work(pause: Pause) -> dict[str, Any]:
        try:
            pause()
        except Exception:
            pytest.fail("being closed is no error of the work")
        return {}

    slices = CooperativeTask(work)
    slices.advance()
    slices.close()
    assert workers() == []


@given(st.lists(st.lists(st.integers(0, 5), max_size=5), min_size=1, max_size=4))
def test_work_never_runs_beside_its_caller(pauses: list[list[int]]) -> None:
    """Several works and their caller change one number without a lock. A thread that ran beside another would find it
    changed between its reading and its writing: the interpreter switches threads as often as it can."""
    number = 0
    beside = False

    def count(times: int) -> None:
        nonlocal number, beside
        for _ in range(times * 20):
            before = number
            sum(range(20))
            beside = beside or number != before
            number = before + 1

    def work(steps: list[int]) -> CooperativeTask:
        def run(pause: Pause) -> dict[str, Any]:
            for step in steps:
                count(step)
                pause()
            return {"steps": len(steps)}

        return CooperativeTask(run)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        left = [work(steps) for steps in pauses]
        while left:
            left = [slices for slices in left if not slices.advance()]
            count(1)
    finally:
        sys.setswitchinterval(interval)
    assert not beside
