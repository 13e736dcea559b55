# SPDX-License-Identifier: Apache-2.0
"""Long work on threads: order, results, and what is left to do after them."""

import threading

import pytest
import torch

from vllm_fp8ext.weights.lanes import Lanes

PATIENCE = 20.0


@pytest.fixture
def lanes() -> Lanes:
    return Lanes(torch.device("cpu"))


def test_jobs_of_a_lane_come_one_after_the_other_and_other_lanes_beside(lanes: Lanes) -> None:
    go, seen = threading.Event(), []

    def first() -> dict[str, int]:
        assert go.wait(PATIENCE)
        seen.append(1)
        return {"value": 1}

    def second() -> dict[str, int]:
        seen.append(2)
        return {"value": 2}

    lanes.start("a", 1, first)
    lanes.start("a", 2, second)
    lanes.start("b", 3, lambda: {"value": 3})
    assert lanes.take(3, PATIENCE) == {"value": 3}
    assert lanes.take(2) is None
    go.set()
    assert lanes.take(2, PATIENCE) == {"value": 2}
    assert lanes.take(1) == {"value": 1}
    assert lanes.take(1) is None, "a result is told once"
    assert seen == [1, 2]


def test_an_error_is_a_result_and_the_lane_goes_on(lanes: Lanes) -> None:
    def fails() -> dict[str, int]:
        raise RuntimeError("no room")

    lanes.start("a", 1, fails)
    lanes.start("a", 2, dict)
    assert "no room" in lanes.take(1, PATIENCE)["error"]["message"]
    assert lanes.take(2, PATIENCE) == {}


def test_what_is_left_to_do_holds_up_no_result_but_the_next_job(lanes: Lanes) -> None:
    go, order = threading.Event(), []

    def after() -> None:
        assert go.wait(PATIENCE)
        order.append("after")
        raise RuntimeError("could not be closed")

    lanes.start("a", 1, lambda: {"value": 1}, after)
    lanes.start("a", 2, lambda: order.append("next") or {})
    assert lanes.take(1, PATIENCE) == {"value": 1}
    assert order == []
    go.set()
    assert lanes.take(2, PATIENCE) == {}
    assert order == ["after", "next"]


def test_work_gets_inference_mode(lanes: Lanes) -> None:
    lanes.start("a", 1, lambda: {"value": torch.is_inference_mode_enabled()})
    assert lanes.take(1, None) == {"value": True}
