# SPDX-License-Identifier: Apache-2.0
"""Updates by `model.load_weights` in the workers of an engine, and what is refused of them.

A part of it on two ranks is in `test_families`, which `make test` has.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .scenarios import SECONDS, run_scenario

pytestmark = [pytest.mark.timeout(SECONDS + 60), pytest.mark.full]
Seen = Callable[[int], dict[str, Any]]
both = pytest.mark.parametrize("ranks", [1, 2])


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What `loads_scenario` saw with so many ranks."""

    @functools.cache
    def facts(ranks: int) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp(f"loads-{ranks}")
        found: dict[str, Any] = run_scenario("loads_scenario.py", folder, str(ranks))
        return found

    return facts


@both
def test_tensors_in_any_order_and_dtype_are_served_at_the_end_mark(seen: Seen, ranks: int) -> None:
    facts = seen(ranks)
    assert facts["cold"][0] == "early"
    assert facts["before the mark"] == ["early", True, "updating", 0]
    assert (facts["late"][0], facts["late"][2]) == ("late", 1)
    assert facts["late"][1] != facts["cold"][1]
    assert facts["in one call"][1] == "early"
    assert all(loaded > 0 for loaded in facts["in one call"][0])
    assert facts["a part"] == [True, 3]


@both
def test_what_is_wrong_is_raised_to_the_caller_and_served_weights_stay(seen: Seen, ranks: int) -> None:
    facts = seen(ranks)
    refused = facts["refused"]
    for way, words in {
        "infinite": "non-finite",
        "shape": "wrong-shape",
        "unknown": "unknown-tensor",
        "twice": "duplicate-tensor",
        "incomplete": "the update lacks",
        "nothing": "no tensor has come",
        "raises": "the trainer's own error",
        "after its end": "the trainer's own error",
        "another is open": "one at a time",
        "open beside": "update-open",
    }.items():
        assert words in (refused[way] or ""), way
    if ranks > 1:
        assert "other tensors than rank 0" in refused["one rank"]
    assert facts["untouched"] == ["early", 4]


@both
def test_who_begins_again_brings_everything(seen: Seen, ranks: int) -> None:
    facts = seen(ranks)
    assert facts["sent again"] == "late"
    assert "the update lacks" in facts["half again"]
    assert facts["begun anew"] == "early"


@both
def test_reload_weights_is_an_update(seen: Seen, ranks: int) -> None:
    facts = seen(ranks)
    assert facts["reloaded"][0] == "late"
    assert facts["beside requests"] == [True, "early"]
    assert facts["went on"] == 600


@both
def test_weights_come_while_the_kv_cache_sleeps(seen: Seen, ranks: int) -> None:
    facts = seen(ranks)
    assert "asleep" in facts["asleep"]
    assert "the update lacks" in facts["part of discarded weights"]
    assert facts["awake"] == ["late", facts["late"][1]]


@both
def test_what_is_written_past_all_loaders_is_found_and_not_served(seen: Seen, ranks: int) -> None:
    facts = seen(ranks)
    assert facts["written past all loaders"] == ["weights-differ", "poisoned"]
    assert facts["healed"] == ["late", "serving"]


def test_an_engine_without_weights_in_its_trainers_process(tmp_path: Path) -> None:
    """Its names come from transformers. An update is served with its last tensor."""
    facts = run_scenario("in_process_scenario.py", tmp_path)
    assert facts["start"] == ["no-weights", []]
    assert facts["names"]
    assert facts["early"][:3] == [0, 1, True]
    assert facts["late"][:3] == [1, 2, True]
    assert facts["late"][3] != facts["early"][3]
    assert facts["refused"] == "wrong-shape"
    assert "load_weights" in facts["a part"]
    assert facts["verified"] == 2
    assert facts["again"]


@pytest.mark.fp8_kv
def test_scales_of_the_kv_cache_come_among_the_tensors(tmp_path: Path) -> None:
    """With the policy `provided`; in NeMo-RL's order of calls."""
    facts = run_scenario("kv_loads_scenario.py", tmp_path, seconds=SECONDS)
    for layer, kinds in facts["served"].items():
        module = layer.removesuffix(".attn")
        for kind, name in (("q", "attn.q_scale"), ("k", "k_scale"), ("v", "v_scale")):
            assert set(kinds[kind]) == {facts["sent"][f"{module}.{name}"]}
    assert (facts["source"], facts["weights"], facts["sampled"]) == ("trainer", True, 16)
    assert "missing layers" in facts["none"]
    assert "has no v" in facts["half"]
    assert "expected numbers from" in facts["zero"]
    assert facts["untouched"] == [True, 1]
    assert facts["again"] != facts["served"]
