# SPDX-License-Identifier: Apache-2.0
"""Estimates for large models, and what they rest on."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from .conftest import script

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def simulation() -> ModuleType:
    return script("scale_simulation")


def case(transport: str, size: float, seconds: float, **more: Any) -> dict[str, Any]:
    common = {"variant": "blockfp8", "load": 0, "staging": "shadow", "samples": [{}]}
    return {**common, "transport": transport, "bytes": size, "total_seconds": seconds, **more}


def test_figures_are_of_idle_engines_alone(simulation: ModuleType) -> None:
    cases = [
        *(case("ipc", size, 0.5 + size * 2e-3) for size in (10.0, 20.0, 100.0)),
        *(case("http", size, size / 4.0) for size in (10.0, 100.0)),
        case("files", 100.0, 5.0),
        case("ipc", 10.0, 99.0, load=128),
        case("ipc", 10.0, 99.0, staging="inplace"),
        case("ipc", 10.0, 99.0, samples=[{"kv_scales": 1.0}]),
        case("ipc", None, 99.0, variant="stock"),
    ]
    measured = simulation.figures(cases)
    assert (measured.fixed, measured.per_byte) == pytest.approx((0.5, 2e-3))
    assert (measured.http, measured.files) == (4.0, 20.0)


def test_slices_divide_what_a_node_receives(simulation: ModuleType) -> None:
    measured = simulation.Figures(fixed=1.0, per_byte=0.0, http=1e9, files=2e9)
    rows = {(row.target, row.way): row for row in simulation.estimates(measured, 50e9)}
    large = {way: row for (target, way), row in rows.items() if target == "1T on 128 GPUs"}
    assert large["HTTP, whole tensors to each node"].seconds == pytest.approx(2001)
    assert large["HTTP, slices to each node"].seconds == pytest.approx(126)
    assert large["HTTP, slices to each node"].bytes_of_a_node == pytest.approx(2e12 / 16)
    assert large["NCCL, slices from rank to rank"].seconds == pytest.approx(1 + 2e12 / 128 / 50e9)
    assert not any(row.built for row in large.values()), "no server spans nodes"
    small = [row for (target, _), row in rows.items() if target == "235B on 8 GPUs"]
    assert [row.way for row in small if not row.built] == ["NCCL, slices from rank to rank"]


def test_the_page_has_what_the_script_says(simulation: ModuleType) -> None:
    results = json.loads((ROOT / "benchmarks/results/scale_simulation.json").read_text())
    measured = simulation.figures(json.loads(simulation.MEASURED.read_text())["cases"])
    rows = simulation.estimates(measured, 1e9 * results["link_gb_per_s"])
    assert [row["seconds"] for row in results["cases"]] == pytest.approx([row.seconds for row in rows])
    page = (ROOT / "docs/scale.md").read_text()
    by_way: dict[str, list[Any]] = {}
    for row in rows:
        by_way.setdefault(row.way, []).append(row)
    for way, (first, second) in by_way.items():
        line = f"| {way} | {first.seconds:.2f} | {second.seconds:.2f} | {first.rests_on} |"
        assert line in page, line
