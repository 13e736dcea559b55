# SPDX-License-Identifier: Apache-2.0
"""Lanes give way to the thread that steps the engine, but not for ever."""

import threading

import pytest

from vllm_fp8ext.weights import turns as module
from vllm_fp8ext.weights.turns import Turns

PATIENCE = 20.0


def waiting(turns: Turns) -> tuple[threading.Thread, threading.Event]:
    done = threading.Event()

    def work() -> None:
        turns.wait()
        done.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread, done


def test_nobody_waits_where_nobody_takes_turns() -> None:
    _, done = waiting(Turns())
    assert done.wait(PATIENCE)


def test_a_lane_waits_until_the_engine_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST_SECONDS", 2 * PATIENCE)
    monkeypatch.setattr(module, "STEP_SECONDS", 2 * PATIENCE)
    turns = Turns()
    turns.take()
    _, done = waiting(turns)
    assert not done.wait(0.1)
    turns.give()
    assert done.wait(PATIENCE)


def test_an_engine_that_never_waits_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEP_SECONDS", 2 * PATIENCE)
    turns = Turns()
    turns.take()
    _, done = waiting(turns)
    assert done.wait(PATIENCE)


def test_an_engine_without_steps_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST_SECONDS", 2 * PATIENCE)
    monkeypatch.setattr(module, "STEP_SECONDS", 0.0)
    turns = Turns()
    turns.take()
    _, done = waiting(turns)
    assert done.wait(PATIENCE)
