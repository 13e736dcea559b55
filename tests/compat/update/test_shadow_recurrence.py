# SPDX-License-Identifier: Apache-2.0
"""The shadow's forwards of layers with states beside vLLM's own, on the CPU build."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from forked_python.processes import run

HERE = Path(__file__).parent
LAYERS = ["qwen3_next", "falcon_h1", "nemotron_h", "lfm2"]
"""Gated DeltaNet, Mamba2 with and without a vector of multipliers, a short convolution."""
ROUNDED = 0.01
"""Relative error of sums whose parts are rounded to BF16 (2^-9 each) in other places: a few of these."""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    out = tmp_path_factory.mktemp("recurrence") / "facts.json"
    line = [sys.executable, "-P", str(HERE / "recurrence_scenario.py"), str(out), *LAYERS]
    done = run(line, env=os.environ | {"VLLM_PLUGINS": "fp8ext"}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-6000:]
    found: dict[str, dict[str, Any]] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize("readable", ["", ", kept"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_computes_what_vllms_does(
    outputs: dict[str, dict[str, Any]], name: str, readable: str
) -> None:
    """Of weights that vLLM has packed, and of those that a served model keeps exchangeable."""
    found = outputs[name + readable]
    assert found["norm"] > 1.0
    assert found["relative error"] < ROUNDED


@pytest.mark.parametrize("name", LAYERS)
def test_prompts_in_a_row_do_not_see_each_other(outputs: dict[str, dict[str, Any]], name: str) -> None:
    assert outputs[name]["prompts alone"] == 0.0
