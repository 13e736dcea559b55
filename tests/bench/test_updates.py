# SPDX-License-Identifier: Apache-2.0
"""What a benchmark of updates beside requests makes of its windows."""

import itertools
from typing import Any

import pytest

from vllm_fp8ext.bench import updates

RATES = [(100.0, 95.0), (160.0, 85.0), (100.0, 90.0)]
"""Tokens per second without updates and with them, by window."""


class Load:
    """Requests whose rates are known."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.rates = iter(RATES)

    def settle(self, *, rested: bool) -> None:
        self.calls.append("rested" if rested else "settle")

    def during(self, begin: float, end: float) -> dict[str, Any]:
        self.calls.append("during")
        usual, then = next(self.rates)
        return {
            "tokens_per_s_before": usual,
            "tokens_per_s_during": then,
            "tokens_per_s_after": usual,
            "stall_seconds": then / 1000,
            "longest_gap_before": None,
            "tokens_lost": 1 - then / usual,
            "steady_before": then != 85.0,
        }


def test_tokens_lost_are_those_over_all_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(updates.time, "monotonic", lambda: float(next(clock)))
    load: Any = Load()

    def push() -> dict[str, float]:
        load.calls.append("push")
        return {"bytes": 8.0, "pause": len(load.calls) / 1000}

    options = updates._parser().parse_args(["--busy-seconds", "4", "--windows", str(len(RATES))])
    case = updates._updates(options, load, push, lambda: None)
    window = ["push", "push", "during"]
    assert load.calls == ["settle", *window, "rested", *window, "rested", *window], (
        "updates follow each other until the time is over"
    )
    assert case["tokens_lost"] == pytest.approx(1 - 90 / 120)
    assert (case["tokens_per_s_before"], case["tokens_per_s_during"]) == (120.0, 90.0)
    assert (case["stall_seconds"], case["longest_gap_before"]) == (0.095, None)
    assert not case["steady_before"], "not in every window"
    assert [one["updates"] for one in case["windows"]] == [2, 2, 2]
    assert len(case["samples"]) == 6
    assert case["pause_seconds"] == 0.011
