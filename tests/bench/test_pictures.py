# SPDX-License-Identifier: Apache-2.0
"""The pictures show what the results say, and can be read by day and by night."""

import hashlib
import re
from pathlib import Path
from types import ModuleType

import pytest

PROJECT = Path(__file__).parents[2]
IMAGES = PROJECT / "docs" / "images"


def written(name: str) -> set[str]:
    """Every text of a picture."""
    return {text.strip() for text in re.findall(r">([^<>]+)</text>", (IMAGES / name).read_text())}


def test_the_timeline_has_the_milliseconds_of_the_results(pictures: ModuleType) -> None:
    for load in (0, 128):
        spans = pictures.phases(pictures.cases("update"), load)
        total = spans.pop("total")
        assert sum(spans.values()) == pytest.approx(total, rel=0.05)
        assert {f"{value:.1f} ms" for value in spans.values()} <= written("update-phases.svg")


def test_the_servers_have_the_rates_of_the_results(pictures: ModuleType) -> None:
    ratios = {
        f"{case['ratio_bf16']:.2f}×"
        for case in pictures.cases("served")
        if pictures.is_shown(case) and case["variant"] in pictures.SERVED
    }
    assert len(ratios) > 8
    assert ratios <= written("served.svg")


def test_steps_have_the_seconds_of_the_results(pictures: ModuleType) -> None:
    shown = {f"{case['step_seconds']['p50']:.1f}" for case in pictures.cases("load")}
    assert shown == {text.partition(" + ")[0] for text in written("load-steps.svg") if " + " in text}


@pytest.mark.parametrize(("name", "on_grid"), [("rl-run.svg", False), ("rl-on-grid.svg", True)])
def test_runs_of_each_variant_are_drawn(pictures: ModuleType, name: str, on_grid: bool) -> None:
    variants = {case["variant"] for case in pictures.runs(on_grid=on_grid)}
    assert variants <= pictures.LINES.keys()
    assert {pictures.LINES[variant][0] for variant in variants} <= written(name)


@pytest.mark.parametrize("file", sorted(IMAGES.glob("*.svg")), ids=lambda file: file.name)
def test_ink_and_ground_follow_the_theme(file: Path) -> None:
    text = file.read_text()
    assert "prefers-color-scheme:dark" in text
    assert text.count("var(--c0)") > 3
    assert "#000000" not in text


@pytest.mark.parametrize("source", sorted(IMAGES.glob("*.mmd")), ids=lambda file: file.name)
def test_diagrams_are_drawn_from_their_sources(source: Path) -> None:
    drawn = source.with_suffix(".svg").read_text()
    assert f"<!-- {hashlib.sha256(source.read_bytes()).hexdigest()} -->" in drawn
