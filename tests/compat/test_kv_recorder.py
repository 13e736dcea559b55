# SPDX-License-Identifier: Apache-2.0
"""What is recorded of K, V and Q in real engines on this CPU, against what reached the cache and the layers."""

from typing import Any

import pytest

from vllm_fp8ext.compat.kv_recorder import Recorder

TOKENS = 33 + 100 + 5
"""Of the prompts."""


def elements(facts: dict[str, Any], tokens: int) -> list[list[int]]:
    """Of one head of K, V and Q, in each layer."""
    layers, width = (3, 64) if facts["kind"] == "plain" else (6, 32)
    return [[tokens * width, tokens * width, tokens * width * 2]] * layers


def test_all_steps_are_recorded(facts: dict[str, Any]) -> None:
    """The same amaxes, counts and saturated elements as were seen where K and V are written and Q comes in."""
    found = facts["recorded"]
    assert found["equal"]
    assert found["elements"] == elements(facts, TOKENS + 3 * (found["steps"] - 1))
    assert found["saturated"] == 0


def test_one_step_in_three_is_recorded(facts: dict[str, Any]) -> None:
    """With scales so small that elements are saturated."""
    found = facts["recorded some"]
    assert found["equal"]
    assert found["steps"] == 7
    assert found["elements"] == elements(facts, TOKENS + 3 * 2)
    assert found["saturated"] > 0


def test_what_was_taken_is_gone(facts: dict[str, Any]) -> None:
    assert facts["recorded"]["empty"]


def test_layers_are_left_as_they_were(facts: dict[str, Any]) -> None:
    assert facts["recorded"]["left alone"]


def test_never_is_no_interval() -> None:
    with pytest.raises(ValueError, match="every: expected at least 1, found 0"):
        Recorder({}, 0)
