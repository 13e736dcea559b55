# SPDX-License-Identifier: Apache-2.0
"""Families whose names, buffers or ties are special, in engines of their own; and other loaders on a served model."""

import importlib.util
from typing import Any

import pytest

from .scenarios import run_scenario

FAMILIES = ["gemma4", "paligemma", "mixtral", "qwen3"]
WITH_IMAGES = ["gemma3", "qwen2_5_vl"]
"""Those that vLLM reads only where there is torchvision."""
RENAMED = {"paligemma", "mixtral", "gemma3", "qwen2_5_vl"}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What became of each family."""
    more = WITH_IMAGES if importlib.util.find_spec("torchvision") else []
    return run_scenario(
        "families_scenario.py", tmp_path_factory.mktemp("families"), *FAMILIES, *more, seconds=560
    )


def family(told: dict[str, Any], name: str) -> dict[str, Any]:
    if name not in told:
        pytest.skip("vLLM reads this family only with torchvision")
    return told[name]


@pytest.mark.parametrize("name", [*FAMILIES, *WITH_IMAGES])
def test_a_family_is_served_as_its_checkpoint_says(told: dict[str, Any], name: str) -> None:
    facts = family(told, name)
    assert facts["cold"]
    assert facts["sampled"][0] != facts["sampled"][1]


@pytest.mark.parametrize("name", sorted({*FAMILIES, *WITH_IMAGES} - {"qwen3"}))
def test_names_of_the_checkpoint_and_of_transformers_go(told: dict[str, Any], name: str) -> None:
    facts = family(told, name)
    assert bool(facts["renamed"]) == (name in RENAMED)
    assert facts["transformers' names"]
    assert facts["the checkpoint's names"]
    assert facts["digests of transformers' names"]
    if name in RENAMED:
        assert facts["both names"] == "duplicate-tensor"
        assert facts["told as it was sent"] == ["wrong-shape", True]
    assert facts["hints"] == [["unknown-tensor", facts["hint"]]] * 4


def test_buffers_that_a_checkpoint_loads_are_in_the_manifest(told: dict[str, Any]) -> None:
    assert told["gemma4"]["scalars"] == [f"model.layers.{layer}.layer_scalar" for layer in (0, 1)]


@pytest.mark.parametrize("name", ["gemma4", "qwen3"])
def test_an_output_layer_that_is_the_embedding_must_be_equal(told: dict[str, Any], name: str) -> None:
    """Qwen3 starts on two ranks with an equal one in its checkpoint."""
    facts = told[name]["ties"]
    assert facts["tied"] == ["lm_head.weight", "model.embed_tokens.weight"]
    for way in ("one mapping", "the embedding first", "the output layer first"):
        assert facts[way] == ["tied-differs", True], way
    assert facts["another shape"] == ["wrong-shape", True]
    assert facts["alone"] == "tied-differs"
    assert facts["untouched"]
    assert facts["alone and equal"]


def test_other_loaders_are_refused_by_name(told: dict[str, Any]) -> None:
    facts = told["qwen3"]["doors"]
    ways = {
        way: found
        for way, found in facts.items()
        if isinstance(found, list) and len(found) == 2 and way != "raised"
    }
    assert len(ways) == 19
    for way, ranks in ways.items():
        assert all(rank and rank.startswith("ForeignLoadError: blockfp8: ") for rank in ranks), (way, ranks)
        assert all("Client.push" in rank and "embedded(engine)" in rank for rank in ranks), way
    assert ["ForeignLoadError" in error or "was refused" in error for error in facts["raised"]] == [
        True,
        True,
    ]
    assert facts["untouched"] == [True, True, True]
    assert facts["pushed"]
