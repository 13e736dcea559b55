# SPDX-License-Identifier: Apache-2.0
"""Runs of benchmarks become a file of results, each case once."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BASE = {"model": "m", "requests": 8, "input": 4, "output": 4, "kv_cache": "fp8"}


def run(commit: str, *cases: dict[str, Any]) -> dict[str, Any]:
    origin = {
        "commit": commit,
        "command": "fp8ext bench rollout --checkpoint /dev/shm/w/m --out /tmp/out/a.json",
    }
    return {"provenance": origin, "copy_gbps": 4.0, "cases": list(cases)}


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    old = {**BASE, "variant": "bf16", "tokens_per_s": 10.0, "run": 0}
    slow = {**BASE, "variant": "blockfp8", "tokens_per_s": 11.0, "ratio_bf16": 1.1, "run": 0}
    results, measured = tmp_path / "results.json", tmp_path / "found.json"
    results.write_text(
        json.dumps({"provenance": {}, "runs": [{"commit": "a"}], "cases": [old, slow]}, indent=1)
    )
    measured.write_text(
        json.dumps(
            run(
                "b",
                {**BASE, "variant": "blockfp8", "settings": {}, "tokens_per_s": 18.0},
                {**BASE, "variant": "blockfp8", "requests": 1, "tokens_per_s": 3.0},
            )
        )
    )
    return results, measured


def added(add_run: ModuleType, monkeypatch: pytest.MonkeyPatch, *line: str | Path) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["add_run.py", *map(str, line)])
    add_run.main()
    loaded: dict[str, Any] = json.loads(Path(line[0]).read_text())
    return loaded


def test_a_first_run_makes_the_file_of_features_one_at_a_time(
    add_run: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured, results = tmp_path / "measured.json", tmp_path / "features.json"
    measured.write_text(json.dumps(run("a", *({**BASE, "feature": name, "on": 2.0} for name in "ab"))))
    after = added(add_run, monkeypatch, results, measured)
    assert [case["feature"] for case in after["cases"]] == ["a", "b"]
    assert after["provenance"] == after["runs"][0]


def test_what_was_found_does_not_tell_cases_apart(
    add_run: ModuleType, monkeypatch: pytest.MonkeyPatch, files: tuple[Path, Path]
) -> None:
    results, measured = files
    for running in (7.25, 7.5):
        case = {**BASE, "variant": "blockfp8_kv", "running": running, "tokens_per_s": running}
        measured.write_text(json.dumps(run("c", case)))
        after = added(add_run, monkeypatch, results, measured)
    assert [case["running"] for case in after["cases"] if "running" in case] == [7.5]


def test_runs_that_no_case_is_of_are_dropped(
    add_run: ModuleType, monkeypatch: pytest.MonkeyPatch, files: tuple[Path, Path]
) -> None:
    results, measured = files
    for commit in ("b", "c"):
        measured.write_text(json.dumps(run(commit, {**BASE, "variant": "blockfp8", "tokens_per_s": 1.0})))
        after = added(add_run, monkeypatch, results, measured)
    assert [one["commit"] for one in after["runs"]] == ["a", "c"]
    assert [(case["variant"], case["run"]) for case in after["cases"]] == [("bf16", 0), ("blockfp8", 1)]
    assert after["provenance"] == after["runs"][1], "of the newest"


def test_fused_experts_are_another_case(
    add_run: ModuleType, monkeypatch: pytest.MonkeyPatch, files: tuple[Path, Path]
) -> None:
    results, measured = files
    measured.write_text(
        json.dumps(run("c", {**BASE, "variant": "apart"}, {**BASE, "variant": "apart", "fused": True}))
    )
    after = added(add_run, monkeypatch, results, measured)
    assert [case.get("fused") for case in after["cases"] if case["variant"] == "apart"] == [None, True]


def test_an_fp8_cache_beside_bf16_throughout(
    add_run: ModuleType, monkeypatch: pytest.MonkeyPatch, files: tuple[Path, Path]
) -> None:
    results, measured = files
    plain = {**BASE, "kv_cache": "auto", "variant": "bf16", "tokens_per_s": 4.0}
    measured.write_text(json.dumps(run("c", plain, {**BASE, "variant": "blockfp8_kv", "tokens_per_s": 8.0})))
    after = added(add_run, monkeypatch, results, measured, "--bf16")
    assert after["cases"][-1]["ratio_bf16"] == 2.0, "the BF16 with an FP8 cache made 10"


def test_a_case_takes_the_place_of_its_like(
    add_run: ModuleType, monkeypatch: pytest.MonkeyPatch, files: tuple[Path, Path]
) -> None:
    after = added(add_run, monkeypatch, *files, "--note", "alone", "--bf16")
    assert [(case["variant"], case["requests"], case["run"]) for case in after["cases"]] == [
        *(("bf16", 8, 0), ("blockfp8", 8, 1), ("blockfp8", 1, 1))
    ]
    assert after["cases"][1]["ratio_bf16"] == 1.8
    assert "ratio_bf16" not in after["cases"][2], "there is no BF16 with one request"
    assert after["runs"][1] == {
        "commit": "b",
        "command": "fp8ext bench rollout --checkpoint m --out a.json",
        "copy_gbps": 4.0,
        "note": "alone",
    }


def test_another_bf16_is_what_all_are_compared_with(
    add_run: ModuleType, monkeypatch: pytest.MonkeyPatch, files: tuple[Path, Path]
) -> None:
    files[1].write_text(json.dumps(run("b", {**BASE, "variant": "bf16", "tokens_per_s": 5.0})))
    after = added(add_run, monkeypatch, *files, "--bf16")
    assert [case.get("ratio_bf16") for case in after["cases"]] == [1.0, 2.2]


def test_an_fp8_kv_cache_is_beside_bf16_with_one(
    add_run: ModuleType, monkeypatch: pytest.MonkeyPatch, files: tuple[Path, Path]
) -> None:
    case = {**BASE, "kv_cache": "auto", "variant": "blockfp8", "tokens_per_s": 18.0}
    files[1].write_text(json.dumps(run("b", case)))
    assert "ratio_bf16" not in added(add_run, monkeypatch, *files, "--bf16")["cases"][-1]


def test_a_file_stays_as_it_was_written(
    add_run: ModuleType, monkeypatch: pytest.MonkeyPatch, files: tuple[Path, Path]
) -> None:
    after = added(add_run, monkeypatch, *files)
    assert files[0].read_text() == json.dumps(after, indent=1) + "\n"
    assert "note" not in after["runs"][1]
    assert "ratio_bf16" not in after["cases"][1]


def test_cases_that_are_not_told_apart_are_refused(
    add_run: ModuleType, monkeypatch: pytest.MonkeyPatch, files: tuple[Path, Path]
) -> None:
    before = files[0].read_text()
    files[1].write_text(json.dumps(run("b", {"model": "m", "layer": 0}, {"model": "m", "layer": 1})))
    with pytest.raises(
        SystemExit, match=r"found\.json: expected cases that differ in model, .* found several"
    ):
        added(add_run, monkeypatch, *files)
    assert files[0].read_text() == before


def test_a_file_of_several_runs_keeps_them_apart(
    add_run: ModuleType, monkeypatch: pytest.MonkeyPatch, files: tuple[Path, Path]
) -> None:
    result = run("b", {**BASE, "requests": 2, "run": 0}, {**BASE, "requests": 3, "run": 1})
    runs = [{**result["provenance"], "commit": commit} for commit in ("b", "c")]
    files[1].write_text(json.dumps({**result, "runs": runs}))
    after = added(add_run, monkeypatch, *files)
    assert [run["commit"] for run in after["runs"]] == ["a", "b", "c"]
    assert all(run["command"].endswith("--checkpoint m --out a.json") for run in after["runs"][1:])
    assert [case["run"] for case in after["cases"][-2:]] == [1, 2]


def test_runs_from_several_seeds_are_cases_of_their_own(
    add_run: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured, results = tmp_path / "measured.json", tmp_path / "rl.json"
    case = {"variant": "fp8", "plan": {"steps": 2, "rate": 1e-4}, "reward": [0.1, 0.2]}
    measured.write_text(json.dumps(run("a", *({**case, "seed": seed} for seed in (0, 1)))))
    assert [one["seed"] for one in added(add_run, monkeypatch, results, measured)["cases"]] == [0, 1]
    assert len(added(add_run, monkeypatch, results, measured)["cases"]) == 2
