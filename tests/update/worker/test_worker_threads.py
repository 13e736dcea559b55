# SPDX-License-Identifier: Apache-2.0
"""Long work on threads: order, results, and what is left to do after them."""

import sys
import threading
import time
from typing import Any

import pytest
import torch

from vllm_fp8ext.errors import Failure
from vllm_fp8ext.update.worker.worker_threads import TURN_SECONDS, WorkerThreads

PATIENCE = 60.0


@pytest.fixture
def threads() -> WorkerThreads:
    return WorkerThreads(torch.device("cpu"))


def test_jobs_of_a_lane_come_one_after_the_other_and_other_lanes_beside(threads: WorkerThreads) -> None:
    go, seen = threading.Event(), []

    def first() -> dict[str, int]:
        assert go.wait(PATIENCE)
        seen.append(1)
        return {"value": 1}

    def second() -> dict[str, int]:
        seen.append(2)
        return {"value": 2}

    threads.start("a", 1, first)
    threads.start("a", 2, second)
    threads.start("b", 3, lambda: {"value": 3})
    assert threads.take_result(3, PATIENCE) == {"value": 3}
    assert threads.take_result(2) is None
    go.set()
    assert threads.take_result(2, PATIENCE) == {"value": 2}
    assert threads.take_result(1) == {"value": 1}
    assert threads.take_result(1) is None, "a result is told once"
    assert seen == [1, 2]


def test_an_error_is_a_result_and_the_lane_goes_on(threads: WorkerThreads) -> None:
    def fails() -> dict[str, int]:
        raise RuntimeError("no room")

    threads.start("a", 1, fails)
    threads.start("a", 2, dict)
    error = threads.take_result(1, PATIENCE)
    assert isinstance(error, Failure)
    assert "no room" in error.message
    assert threads.take_result(2, PATIENCE) == {}


def test_what_is_left_to_do_waits_until_the_lane_is_quiet(threads: WorkerThreads) -> None:
    order, over = [], threading.Event()

    def after() -> None:
        order.append("after")
        over.set()
        raise RuntimeError("could not be closed")

    threads.start("a", 1, dict, after)
    threads.start("a", 2, lambda: order.append("next") or {})
    assert threads.take_result(2, PATIENCE) == {}
    assert over.wait(PATIENCE)
    assert order == ["next", "after"]
    threads.start("a", 3, dict)
    assert threads.take_result(3, PATIENCE) == {}, "the thread goes on"
    assert order == ["next", "after"], "once"


def test_what_is_left_to_do_is_done_before_more_is_left(threads: WorkerThreads) -> None:
    order = []
    threads.start("a", 1, dict, lambda: order.append("after"))
    threads.start("a", 2, lambda: order.append("next") or {}, lambda: None)
    assert threads.take_result(2, PATIENCE) == {}
    assert order == ["after", "next"]


def test_what_is_left_to_do_can_be_done_at_once(
    threads: WorkerThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_fp8ext.update.worker.worker_threads.QUIET_SECONDS", PATIENCE)
    order = []
    threads.start("a", 1, dict, lambda: order.append("after"))
    assert threads.take_result(1, PATIENCE) == {}
    threads.run_cleanups()
    assert order == ["after"]


def test_what_is_left_to_do_is_waited_for_whoever_does_it(threads: WorkerThreads) -> None:
    begun, go = threading.Event(), threading.Event()
    order = []

    def after() -> None:
        begun.set()
        assert go.wait(PATIENCE)
        order.append("after")

    threads.start("a", 1, dict, after)
    assert begun.wait(PATIENCE), "the thread is quiet, and has begun"
    threading.Timer(0.05, go.set).start()
    threads.run_cleanups()
    assert order == ["after"]


def test_what_is_left_to_do_is_known_with_the_result(
    threads: WorkerThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_fp8ext.update.worker.worker_threads.QUIET_SECONDS", PATIENCE)
    order: list[str] = []
    tell = threads.set_result

    def told(job: int, result: dict[str, Any]) -> None:
        tell(job, result)
        threads.run_cleanups()  # as somebody who waited for the result

    monkeypatch.setattr(threads, "set_result", told)
    threads.start("a", 1, dict, lambda: order.append("after"))
    threads.start("a", 2, dict)
    assert threads.take_result(2, PATIENCE) == {}
    assert order == ["after"]


def test_work_gets_inference_mode(threads: WorkerThreads) -> None:
    threads.start("a", 1, lambda: {"value": torch.is_inference_mode_enabled()})
    assert threads.take_result(1, None) == {"value": True}


def test_threads_take_short_turns_while_a_lane_works(threads: WorkerThreads) -> None:
    usual, go = sys.getswitchinterval(), threading.Event()
    told = threading.Semaphore(0)

    def work() -> dict[str, float]:
        told.release()
        assert go.wait(PATIENCE)
        return {"seconds": sys.getswitchinterval()}

    over = threading.Semaphore(0)
    threads.start("a", 1, work)
    threads.start("b", 2, work)
    for _ in "ab":
        assert told.acquire(timeout=PATIENCE)
    assert sys.getswitchinterval() == pytest.approx(TURN_SECONDS)
    go.set()
    for name in "ab":  # a thread is at its next job once it is done with the one before
        threads.start(name, 3 + ord(name), dict, over.release)
        assert over.acquire(timeout=PATIENCE)
    until = time.monotonic() + PATIENCE
    while sys.getswitchinterval() != usual and time.monotonic() < until:
        time.sleep(0.001)
    assert sys.getswitchinterval() == pytest.approx(usual)
    assert [threads.take_result(job)["seconds"] for job in (1, 2)] == [pytest.approx(TURN_SECONDS)] * 2
