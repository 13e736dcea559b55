# SPDX-License-Identifier: Apache-2.0
"""The gain of a feature: engines with all features beside one without it."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from forked_python.processes import run

from vllm_fp8ext.checkpoints import EARLY

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "features.py"


def case(requests: int, off: list[str], *samples: float) -> dict[str, Any]:
    settings = {"staging": "none", "features_off": off}
    load = {"model": "m", "requests": requests, "input": 4, "output": 4, "kv_cache": "fp8"}
    return {**load, "settings": settings, "samples": list(samples)}


def test_a_feature_is_compared_with_the_engine_that_has_all(
    features_script: ModuleType, performance_page: ModuleType
) -> None:
    measured = [
        case(8, [], 10.0, 30.0, 11.0),
        case(8, ["fusion"], 9.0, 8.0, 10.0),
        case(8, ["norm_rope"], 20.0),
        case(128, [], 50.0),
        case(128, ["fusion"], 60.0),
    ]
    few, many = compared = features_script._compared("fusion", measured)
    assert (few["on"], few["off"], few["samples"]["off"]) == (11.0, 9.0, [9.0, 8.0, 10.0])
    assert few["gain"] == pytest.approx(2 / 9)
    assert (many["requests"], many["on"], many["off"]) == (128, 50.0, 60.0)
    rows = performance_page._feature_gains(compared).splitlines()
    assert rows[2] == "| `fusion` | m | 8 × 4/4 | 11: 10–30 | 9: 8–10 | +22.2% |"
    assert rows[3].endswith("| -16.7% |")


def test_output_layers_are_compared_with_the_default(performance_page: ModuleType) -> None:
    load = {"model": "m", "requests": 8, "input": 4, "output": 4, "kv_cache": "fp8"}
    measured = [
        {**load, "settings": settings, "tokens_per_s": rate, "kl": kl, "same_choice": 1 - kl}
        for settings, rate, kl in (({}, 100.0, 0.0), ({"lm_head": "blockfp8"}, 107.0, 0.0123))
    ]
    rows = performance_page._lm_head(measured).splitlines()[2:]
    assert rows == [
        "| m | 8 × 4/4 | `bf16` | 100 (1.00×) | 0 | 100.0% |",
        "| m | 8 × 4/4 | `blockfp8` | 107 (1.07×) | 0.012 | 98.8% |",
    ]


@pytest.mark.full
def test_engines_without_one_feature_take_turns_with_the_one_that_has_all(tmp_path: Path) -> None:
    out = tmp_path / "features.json"
    line = [
        sys.executable,
        "-P",
        str(SCRIPT),
        "--features",
        "slot_fast_path",
        "--cases",
        "2x8x6",
        "--out",
        str(out),
    ]
    line += ["--", "--checkpoint", str(EARLY), "--kv-gib", "0.05", "--repeats", "2"]
    done = run([*line, "--engine", '{"enforce_eager": true}'], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    [found] = json.loads(out.read_text())["cases"]
    assert (found["feature"], found["model"], found["requests"]) == ("slot_fast_path", "early", 2)
    assert [len(samples) for samples in found["samples"].values()] == [2, 2]
    assert found["gain"] == pytest.approx(found["on"] / found["off"] - 1)
