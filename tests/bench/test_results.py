# SPDX-License-Identifier: Apache-2.0
"""What was measured is what the documentation promises."""

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
KERNEL = {
    *("kernel", "shape", "m", "variant", "us", "samples", "gbps", "tflops", "ratio_bf16", "ratio_copy"),
    *("exact", "run"),
}
ROLLOUT = {
    *("model", "requests", "input", "output", "kv_cache", "staging", "variant", "tokens_per_s", "samples"),
    *("ms_per_step", "ratio_bf16", "run"),
}
"""Fields of a case."""
FEWER = {("Qwen3-30B-A3B", "bf16")}
"""Whose samples are fewer than five."""


def results(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / name).read_text())
    return loaded


@pytest.mark.parametrize(
    "name", ["kernels_h200.json", "rollout_h200.json", "rl_cpu.json", "two_gpus_h200.json"]
)
def test_every_case_is_of_a_run_and_every_run_has_cases(name: str) -> None:
    result = results(name)
    assert {case["run"] for case in result["cases"]} == set(range(len(result["runs"])))
    assert result["provenance"] in result["runs"]
    for run in result["runs"]:
        assert run["gpus"] or run["cpu"], run
        assert all(run[field] for field in ("versions", "commit", "date", "command")), run


def test_what_a_case_of_a_kernel_says() -> None:
    for case in results("kernels_h200.json")["cases"]:
        assert set(case) >= KERNEL, (KERNEL - set(case), case)
        if case["error"]:
            assert case["us"] is None, case
            assert not case["variant"].startswith("blockfp8"), case
            continue
        assert len(case["samples"]) >= 5, case
        assert case["us"] == pytest.approx(statistics.median(case["samples"])), case
        if case["variant"].startswith(("blockfp8", "decode_gemm", "deep_gemm_codes")):
            assert case["exact"] is True, case


def test_what_a_case_of_an_engine_says() -> None:
    for case in results("rollout_h200.json")["cases"]:
        assert set(case) >= ROLLOUT, (ROLLOUT - set(case), case)
        fewest = 2 if (case["model"], case["variant"]) in FEWER else 5
        assert len(case["samples"]) >= fewest, case
        assert case["tokens_per_s"] == pytest.approx(statistics.median(case["samples"])), case


def test_the_memory_that_updates_took_is_within_its_bound() -> None:
    page = " ".join((ROOT / "docs" / "weight-updates.md").read_text().split())
    match = re.search(r"Staging takes less than (\d+) MiB at a time, and keeps (\d+) MiB once", page)
    assert match is not None
    staging, kept = (int(text) * MIB for text in match.groups())
    cases = [
        case
        for case in json.loads((ROOT / "benchmarks/results/update_h200.json").read_text())["cases"]
        if case["variant"] == "blockfp8"
        and case["transport"] in ("ipc", "http", "files")
        # calibration has a bound of its own
        and not (case.get("settings") or {}).get("kv_scales")
    ]
    assert {case["transport"] for case in cases} == {"ipc", "http", "files"}
    for case in cases:
        bound = staging + (0 if case["transport"] == "ipc" else kept)
        assert case["peak_extra_bytes"] < bound, (case["model"], case["transport"], case["load"])


def test_what_a_case_of_reinforcement_learning_says() -> None:
    cases = results("rl_cpu.json")["cases"]
    for case in cases:
        curves = [case[name] for name in ("reward", "mismatch_kl", "ess", "entropy")]
        assert {len(curve) for curve in curves} == {case["plan"]["steps"]}, case["variant"]
        assert case["seconds"] < 8 * 60, case["variant"]
    keys = [(case["variant"], case["seed"], case["plan"]["on_grid"]) for case in cases]
    assert len(set(keys)) == len(keys)
    assert {seed for _, seed, _ in keys} == {0, 1, 2}
