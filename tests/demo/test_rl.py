# SPDX-License-Identifier: Apache-2.0
"""Results of `fp8ext demo rl`: each run keeps the provenance of the call that made it, and is not trained twice."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_fp8ext.demo import rl

CURVE = [0.5, 0.5]


class NoServer:
    """A server for runs that ask it nothing."""

    def __enter__(self) -> "NoServer":
        return self

    def __exit__(self, *_: object) -> None: ...

    def wait(self) -> None: ...


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The runs that were trained; their curves are made up."""
    runs: list[tuple[str, int]] = []

    def train(_: Any, __: Path, name: str, seed: int, plan: rl.Plan, *___: Any) -> dict[str, Any]:
        runs.append((name, seed))
        curves = dict.fromkeys(rl.CURVES, CURVE)
        times = {"accuracy": 0.5, "step_seconds": {"push": 1.0}, "seconds": 1.0}
        return {"variant": name, "seed": seed, "plan": rl.asdict(plan), **curves, **times}

    monkeypatch.setattr(rl, "_train", train)
    monkeypatch.setattr(rl, "_server", lambda *_: NoServer())
    return runs


def test_a_later_call_leaves_the_provenance_of_earlier_runs(
    tmp_path: Path, trained: list[tuple[str, int]]
) -> None:
    out = tmp_path / "rl.json"
    for commit, seeds in (("a", [0]), ("b", [0, 1]), ("c", [0, 1])):
        rl.run(["bf16", "fp8"], seeds, rl.Plan(), origin={"commit": commit}, out=out)
    results = json.loads(out.read_text())
    assert trained == [("bf16", 0), ("fp8", 0), ("bf16", 1), ("fp8", 1)]
    made_by = {
        (case["variant"], case["seed"]): results["runs"][case["run"]]["commit"] for case in results["cases"]
    }
    assert made_by == {("bf16", 0): "a", ("fp8", 0): "a", ("bf16", 1): "b", ("fp8", 1): "b"}
    assert results["provenance"] == {"commit": "b"}
    assert [path.name for path in tmp_path.iterdir()] == ["rl.json"]


def test_a_page_that_cannot_be_drawn_is_told_before_anything_is_trained(
    tmp_path: Path, trained: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.delitem(sys.modules, "vllm_fp8ext.demo.rl_page", raising=False)
    with pytest.raises(ModuleNotFoundError):
        rl.run(["bf16"], [0], rl.Plan(), origin={}, html=tmp_path / "rl.html")
    assert not trained
