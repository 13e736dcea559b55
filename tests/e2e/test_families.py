# SPDX-License-Identifier: Apache-2.0
"""Families whose names, buffers or ties are special, in engines of their own; and other loaders on a served model."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from .scenarios import SECONDS, run_scenario
from .vision import has_torchvision

pytestmark = pytest.mark.timeout(SECONDS + 60)
FAMILIES = ["gemma4", "paligemma", "mixtral", "qwen3"]
WITH_IMAGES = ["gemma3", "qwen2_5_vl"]
"""Those that vLLM reads only where there is torchvision."""
REPRESENTATIVES = {"qwen3"}
"""Families that `make test` has."""
RENAMED = {"paligemma", "mixtral", "gemma3", "qwen2_5_vl"}


Families = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Families:
    """What became of a family, each in a process of its own when it is first asked for."""

    @functools.cache
    def seen(name: str) -> dict[str, Any]:
        vision = name in WITH_IMAGES
        if vision and not has_torchvision():
            pytest.skip("vLLM reads this family only with torchvision")
        folder = tmp_path_factory.mktemp(name)
        found: dict[str, Any] = run_scenario("families_scenario.py", folder, name, vision=vision)[name]
        return found

    return seen


def every(names: Iterable[str]) -> list[Any]:
    """Families as parameters: all but the representatives are left to `make test-all`."""
    return [pytest.param(name, marks=() if name in REPRESENTATIVES else pytest.mark.full) for name in names]


@pytest.mark.parametrize("name", every([*FAMILIES, *WITH_IMAGES]))
def test_a_family_is_served_as_its_checkpoint_says(families: Families, name: str) -> None:
    facts = families(name)
    assert facts["cold"]
    assert facts["sampled"][0] != facts["sampled"][1]


def test_an_output_layer_in_fp8_follows_its_embedding(families: Families) -> None:
    """On two ranks: after the start, and after all updates, of which some were refused."""
    assert families("qwen3")["head copies"] == [[[True]] * 2] * 2


@pytest.mark.full
def test_an_output_layer_is_in_16_bits_by_default(families: Families) -> None:
    assert families("gemma4")["head copies"] == [[[]]] * 2


@pytest.mark.parametrize("name", every(sorted({*FAMILIES, *WITH_IMAGES} - {"qwen3"})))
def test_names_of_the_checkpoint_and_of_transformers_go(families: Families, name: str) -> None:
    facts = families(name)
    assert bool(facts["renamed"]) == (name in RENAMED)
    assert facts["transformers' names"]
    assert facts["the checkpoint's names"]
    assert facts["digests of transformers' names"]
    if name in RENAMED:
        assert facts["both names"] == "duplicate-tensor"
        assert facts["told as it was sent"] == ["wrong-shape", True]
    assert facts["hints"] == [["unknown-tensor", facts["hint"]]] * 4


@pytest.mark.full
def test_buffers_that_a_checkpoint_loads_are_in_the_manifest(families: Families) -> None:
    assert families("gemma4")["scalars"] == [f"model.layers.{layer}.layer_scalar" for layer in (0, 1)]


@pytest.mark.parametrize("name", every(["gemma4", "qwen3"]))
def test_an_output_layer_that_is_the_embedding_must_be_equal(families: Families, name: str) -> None:
    """Qwen3 starts on two ranks with an equal one in its checkpoint."""
    facts = families(name)["ties"]
    assert facts["tied"] == ["lm_head.weight", "model.embed_tokens.weight"]
    for way in ("one mapping", "the embedding first", "the output layer first"):
        assert facts[way] == ["tied-differs", True], way
    assert facts["another shape"] == ["wrong-shape", True]
    assert facts["alone"] == "tied-differs"
    assert facts["untouched"]
    assert facts["alone and equal"]


def test_other_loaders_are_refused_by_name(families: Families) -> None:
    facts = families("qwen3")["doors"]
    ways = {
        way: found
        for way, found in facts.items()
        if isinstance(found, list) and len(found) == 2 and way != "raised"
    }
    assert len(ways) == 16
    for way, ranks in ways.items():
        assert all(rank and rank.startswith("ForeignLoadError: blockfp8: ") for rank in ranks), (way, ranks)
        assert all("Client.push" in rank and "embedded(engine)" in rank for rank in ranks), way
    assert ["ForeignLoadError" in error or "was refused" in error for error in facts["raised"]] == [
        True,
        True,
    ]
    assert facts["untouched"] == [True, True, True]
    assert facts["pushed"]


def test_load_weights_in_the_workers_is_an_update(families: Families) -> None:
    """Of two ranks. What is written past every loader is found, and served no longer."""
    facts = families("qwen3")["loads"]
    epoch = facts["before the end"]
    assert facts["served"] == [True, epoch + 1]
    assert facts["reloaded"] == [True, epoch + 2]
    assert facts["written past all loaders"] == ["weights-differ", "poisoned"]
    assert facts["healed"] == [True, "serving"]
