# SPDX-License-Identifier: Apache-2.0
"""`fp8ext demo rl`: runs through real servers, which a second call does not repeat."""

import json
import sys
from pathlib import Path

import pytest
from forked_python.processes import run

pytestmark = [pytest.mark.alone, pytest.mark.full]


def test_runs_are_kept_and_not_repeated(tmp_path: Path) -> None:
    results, html = tmp_path / "rl.json", tmp_path / "rl.html"
    line = [
        sys.executable,
        "-P",
        "-m",
        "vllm_fp8ext.cli",
        "demo",
        "rl",
        "--steps",
        "2",
        "--json",
        str(results),
    ]
    variants = [word for name in ("bf16", "fp8_kv_end_to_end_tis") for word in ("--variants", name)]
    first = run([*line, *variants], capture_output=True, text=True, timeout=1700)
    assert first.returncode == 0, first.stdout + first.stderr
    cases = json.loads(results.read_text())["cases"]
    assert [case["variant"] for case in cases] == ["bf16", "fp8_kv_end_to_end_tis"]
    for case in cases:
        assert {len(case[curve]) for curve in ("reward", "mismatch_kl", "ess", "entropy")} == {2}
        assert 0 < case["mismatch_kl"][1] < 0.005  # 0.01 and more, were one side to round otherwise
        assert case["step_seconds"]["push"] > 0
    again = run([*line, *variants, "--html", str(html)], capture_output=True, text=True, timeout=500)
    assert again.returncode == 0, again.stdout + again.stderr
    assert json.loads(results.read_text())["cases"] == cases
    assert "fp8_kv_end_to_end_tis" in html.read_text()


def test_an_unknown_variant_is_named() -> None:
    line = [sys.executable, "-P", "-m", "vllm_fp8ext.cli", "demo", "rl", "--variants", "fp9"]
    done = run(line, capture_output=True, text=True, timeout=500)
    assert done.returncode == 1
    assert "expected some of bf16, fp8" in done.stderr
    assert "found fp9" in done.stderr
