# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/host_step.py` on real engines on this CPU: vLLM's cache is asked for slots where it has to be."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from forked_python.processes import run

from vllm_fp8ext.checkpoints import EARLY

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "host_step.py"
pytestmark = pytest.mark.full
REQUESTS = 5
LAYERS = 3


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("host") / "host_step.json"
    line = [sys.executable, "-P", str(SCRIPT), "--checkpoint", str(EARLY), "--variants", "bf16", "blockfp8"]
    line += ["--kv-gib", "0.05", "--engine", '{"enforce_eager": true}']
    line += ["--settings", "{}", '{"kernels": {"slot_fast_path": false}}']
    line += ["--cases", f"{REQUESTS}x8x40", f"{REQUESTS}x8x1"]
    done = run([*line, "--out", str(out)], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "update_from_output" in done.stdout
    result: list[dict[str, Any]] = json.loads(out.read_text())["cases"]
    return result


@pytest.fixture(scope="module")
def cases(told: list[dict[str, Any]]) -> dict[str, Any]:
    matching = [case for case in told if case["output"] > 1]
    return {f"{case['variant']} {json.dumps(case['settings'])}": case for case in matching}


def test_parts_of_a_step_are_told(cases: dict[str, Any]) -> None:
    for case in cases.values():
        assert case["steps"] > 20
        told = {part["part"]: part["calls"] for part in case["parts"]}
        assert told["schedule"] == told["update_from_output"] == told["the rest"] == 1


def test_requests_that_hold_a_slot_ask_vllm_for_none(cases: dict[str, Any]) -> None:
    asked = {
        kind: [part["calls"] for part in case["parts"] if part["part"] == "allocate_slots"]
        for kind, case in cases.items()
    }
    other = 'blockfp8 {"kernels": {"slot_fast_path": false}}'
    assert asked == {"bf16 {}": [REQUESTS], "blockfp8 {}": [], other: [REQUESTS]}


def test_parts_of_the_first_tokens_are_told(told: list[dict[str, Any]]) -> None:
    matching = [case for case in told if case["output"] == 1]
    assert len(matching) == 3
    for case in matching:
        parts = {part["part"]: part for part in case["parts"]}
        assert parts["attention but FlashAttention"]["calls"] == LAYERS
        assert case["us"] > sum(parts[name]["us"] for name in ("schedule", "attention but FlashAttention"))
