# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/host_step.py` on real engines on this CPU: vLLM's cache is asked for slots where it has to be."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_fp8ext.checkpoints import EARLY

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "host_step.py"
REQUESTS = 5


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("host") / "host_step.json"
    line = [sys.executable, "-P", str(SCRIPT), "--checkpoint", str(EARLY), "--variants", "bf16", "blockfp8"]
    line += ["--kv-gib", "0.05", "--cases", f"{REQUESTS}x8x40", "--engine", '{"enforce_eager": true}']
    done = subprocess.run([*line, "--out", str(out)], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "update_from_output" in done.stdout
    return {case["variant"]: case for case in json.loads(out.read_text())["cases"]}


def test_parts_of_a_step_are_told(cases: dict[str, Any]) -> None:
    for case in cases.values():
        assert case["steps"] > 20
        told = {part["part"]: part["calls"] for part in case["parts"]}
        assert told["schedule"] == told["update_from_output"] == told["the rest"] == 1


def test_requests_that_hold_a_slot_ask_vllm_for_none(cases: dict[str, Any]) -> None:
    asked = {
        variant: [part["calls"] for part in case["parts"] if part["part"] == "allocate_slots"]
        for variant, case in cases.items()
    }
    assert asked == {"bf16": [REQUESTS], "blockfp8": []}
