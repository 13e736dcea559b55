# SPDX-License-Identifier: Apache-2.0
"""Engines in the trainer's own process: one updated in place, put to sleep and woken, one whose calls block."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .scenarios import SECONDS, run_scenario

pytestmark = pytest.mark.timeout(SECONDS + 60)


@pytest.fixture(scope="session")
def facts(tmp_path_factory: pytest.TempPathFactory, kv_dtype: str) -> dict[str, Any]:
    """What `embedded_scenario` saw."""
    result: dict[str, Any] = run_scenario(
        "embedded_scenario.py",
        tmp_path_factory.mktemp("embedded"),
        kv_dtype,
        ends=-signal.SIGKILL,
    )
    return result


@pytest.fixture(scope="session")
def blocking(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `llm_scenario` saw."""
    facts: dict[str, Any] = run_scenario("llm_scenario.py", tmp_path_factory.mktemp("llm"))
    return facts


def test_an_update_reaches_the_engine_in_the_same_process(facts: dict[str, Any]) -> None:
    assert facts["sampled late"] != facts["sampled early"]
    assert (facts["late"]["epoch"], facts["late"]["state"], facts["verified"]) == (1, "serving", 1)
    assert facts["sampled early again"] == facts["sampled early"]
    assert facts["digests equal"]
    assert facts["addresses equal"]


@pytest.mark.fp8_kv
def test_scales_of_the_kv_cache_come_with_the_weights_in_place(facts: dict[str, Any]) -> None:
    scales = facts["scales"]
    early, late = scales["early"], scales["late"]
    assert early != late
    assert scales["half-way"] == late, "an update that ends half-way brings none"
    assert scales["early again"] == scales["asleep"] == early
    assert scales["late again"] == late
    assert facts["verified after sleep"] == "late, asleep"


def test_the_engine_of_a_trainer_that_is_killed_ends(
    facts: dict[str, Any], ended: Callable[[int], bool]
) -> None:
    assert len(facts["its processes"]) >= 2
    assert all(map(ended, facts["its processes"]))


def test_in_place_costs_no_shadow_and_has_no_rollback(facts: dict[str, Any]) -> None:
    assert facts["start"]["twin_bytes"] == [0]
    assert facts["late"]["previous_version"] is None
    assert facts["rollback"] == "no-previous"


def test_requests_stand_still_in_place_and_go_on(facts: dict[str, Any]) -> None:
    assert facts["running went on"] == 400


def test_a_session_whose_k_and_v_can_t_be_computed_again_outlasts_an_update_that_asks_for_it(
    facts: dict[str, Any],
) -> None:
    """vLLM fails when it is to take the blocks of a request that waits for the next bit of its input."""
    assert facts["recompute beside a session"] == "not-recomputable"
    assert (facts["after that"]["epoch"], facts["after that"]["state"]) == (0, "serving")
    assert len(facts["session"]) == 12
    assert facts["session that went on"] == facts["session"]


def test_in_place_refuses_to_wait_for_requests_before_anything_is_written(facts: dict[str, Any]) -> None:
    assert (facts["wait"], facts["after wait"]) == ("invalid-request", "serving")


def test_half_an_update_in_place_is_never_served(facts: dict[str, Any]) -> None:
    assert facts["abandoned before anything came"] == "serving"
    assert facts["refused half-way"] == "non-finite"
    assert facts["half-way"]["state"] == "poisoned"
    assert "half-way" in facts["half-way"]["poisoned"]
    assert facts["sampled half-way"] == []
    assert facts["partial on half"] == "poisoned"
    assert facts["healed"]["state"] == "serving"


def test_what_fails_in_the_trainer_is_raised_there(facts: dict[str, Any]) -> None:
    assert facts["an error of the trainer's"] == "a shard is gone"


def test_an_update_that_is_open_when_it_is_left_is_given_up(facts: dict[str, Any]) -> None:
    """Nobody is left to finish it, and the engine would stand still for it."""
    assert facts["left half-way"] == [None, "poisoned"]
    assert facts["sampled after leaving"] == facts["sampled late"]


def test_nobody_makes_an_engine_go_on_half_way(facts: dict[str, Any]) -> None:
    assert facts["stood still"]
    assert facts["asked half-way"] == ["staging", "staging", "update-open"]
    assert facts["sampled by the whole"] == facts["sampled late"]


def test_an_update_while_the_weights_are_asleep_is_refused(facts: dict[str, Any]) -> None:
    assert facts["asleep"] == "asleep"
    assert facts["asleep refused"] == ["asleep"] * 4
    assert facts["no sleep over the routes"] == "sleep-unavailable"


def test_weights_can_be_updated_before_the_kv_cache_wakes(facts: dict[str, Any]) -> None:
    assert facts["update before the KV cache wakes"] is None
    assert facts["sampled after sleep"] == facts["sampled late"]


def test_discarded_weights_are_not_served_before_an_update(facts: dict[str, Any]) -> None:
    assert facts["open update, level 2"] == "abandoned"
    assert facts["discarded"]["state"] == "poisoned"
    assert "sleep level 2" in facts["discarded"]["poisoned"]
    assert facts["sampled discarded"] == []
    assert facts["healed from sleep"] == "serving"
    assert facts["sampled late again"] == facts["sampled late"]


def test_an_engine_whose_calls_block_is_updated_between_them(blocking: dict[str, Any]) -> None:
    assert blocking["sampled late"] != blocking["sampled early"]
    assert blocking["sampled early again"] == blocking["sampled early"]
    assert blocking["digests again"] == blocking["cold"]
    assert blocking["verified"] == 1


def test_a_blocking_engine_has_one_session_after_the_other(blocking: dict[str, Any]) -> None:
    assert "one session of updates for an engine at a time" in blocking["session beside"]
    assert blocking["epoch in another session"] == 1


def test_what_is_refused_leaves_a_blocking_engine_as_it_was(blocking: dict[str, Any]) -> None:
    assert (blocking["incomplete"], blocking["infinite"]) == ("incomplete", "non-finite")
    assert blocking["sampled after refusals"] == blocking["sampled late"]


def test_a_blocking_engine_is_updated_while_another_thread_generates(blocking: dict[str, Any]) -> None:
    assert blocking["beside requests"] == [4, True]
    assert blocking["went on"] == 900


def test_a_blocking_engine_sleeps_and_wakes(blocking: dict[str, Any]) -> None:
    assert blocking["no sleep over the routes"] == "sleep-unavailable"
    assert (blocking["asleep"], blocking["refused asleep"], blocking["awake"]) == (
        "asleep",
        "asleep",
        "serving",
    )
    assert blocking["sampled awake"] == blocking["sampled early"]


def test_a_blocking_engine_that_died_is_named(blocking: dict[str, Any]) -> None:
    assert blocking["died"] == "engine-dead"


@pytest.mark.full
def test_a_model_with_a_constant_without_dimensions_is_updated(tmp_path: Path) -> None:
    facts = run_scenario("gemma_scenario.py", tmp_path)
    assert facts["one"] != facts["other"]
    assert facts["one again"] == facts["one"]
    assert facts["state"] == "serving"
