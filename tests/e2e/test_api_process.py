# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/api_process.py`: whole answers and streams of vLLM's application, over messages of no engine."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from forked_python.processes import run

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "api_process.py"
pytestmark = pytest.mark.full
CASES = ("4", "4:logprobs=1:n", "4:chat:logprobs=0:streamed", "4:generate:logprobs=0")


@pytest.mark.parametrize("variant", ["blockfp8", "bf16"])
def test_every_route_answers(tmp_path: Path, variant: str) -> None:
    line = [sys.executable, "-P", str(SCRIPT), "--variant", variant, "--out", str(tmp_path / "out.json")]
    line += ["--input", "32", "--output", "40", "--repeat", "1", "--samples-per-prompt", "2"]
    done = run([*line, "--cases", *CASES], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    cases: list[dict[str, Any]] = json.loads((tmp_path / "out.json").read_text())["cases"]
    assert [(case["route"], case["logprobs"], case["streamed"]) for case in cases] == [
        ("completions", None, False),
        ("completions", 1, False),
        ("chat", 0, True),
        ("generate", 0, False),
    ]
    for case in cases:
        assert case["us_per_token"] > 0
        assert case["end_ms"] >= 0
        # each message has statistics of its step, so each is sent
        assert case["messages"] >= 40
