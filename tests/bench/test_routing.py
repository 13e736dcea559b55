# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of `benchmarks/routing.py`; `tests/e2e/test_experts.py` follows routes in engines with it."""

import json
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_experts_are_compared_as_sets(routing: ModuleType) -> None:
    one = [[[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 1], [0, 1], [0, 1], [0, 1]]]
    other = [[[1, 0], [2, 4], [6, 7], [6, 7]], [[0, 1], [0, 1], [0, 1], [1, 0]]]
    first, second = routing.differing(one, other)
    assert first == {"layer": 0, "tokens": 4, "tokens_differ": 0.5, "choices_differ": 3 / 8}
    assert second == {"layer": 1, "tokens": 4, "tokens_differ": 0.0, "choices_differ": 0.0}


def test_the_page_has_the_numbers_of_the_result() -> None:
    result = json.loads((BENCHMARKS / "results" / "routing_cpu.json").read_text())
    page = (BENCHMARKS.parent / "docs" / "moe.md").read_text()
    for case in result["cases"]:
        if case["other"] == "FP8":
            row = f"| {case['checkpoint']} | {case['layer']} | {case['tokens_differ']:.2%} | {case['choices_differ']:.2%} |"
            assert row.replace("%", " %") in page
        else:
            assert case["tokens_differ"] == 0
