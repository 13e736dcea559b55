# SPDX-License-Identifier: Apache-2.0
"""The benchmark of whole engines, on the tiny model."""

import json
import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from forked_python.processes import run

from vllm_fp8ext.checkpoints import EARLY
from vllm_fp8ext.cli import cli
from vllm_fp8ext.errors import ConfigError


def bench(line: list[str], **variables: str) -> None:
    """Run `fp8ext` with these words to its end."""
    program = [sys.executable, "-P", "-m", "vllm_fp8ext.cli", *line]
    done = run(program, env=os.environ | variables, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.full
def test_engines_take_turns(tmp_path: Path):
    out = tmp_path / "rollout.json"
    line = ["bench", "rollout", "--checkpoint", str(EARLY), "--variants", "bf16", "blockfp8"]
    line += ["--cases", "3x8x6", "--repeats", "2", "--kv-gib", "0.05", "--out", str(out)]
    line += ["--engine", '{"enforce_eager": true}', "--settings", "{}", '{"staging": "inplace"}']
    bench(line)
    found = json.loads(out.read_text())
    assert found["provenance"]["versions"]["vllm-fp8ext"]
    bf16, ours, other = cases = found["cases"]
    assert [case["variant"] for case in cases] == ["bf16", "blockfp8", "blockfp8"]
    assert [case["staging"] for case in cases] == ["none", "shadow", "inplace"]
    assert other["settings"] == {"staging": "inplace"}
    assert all((case["requests"], case["input"], case["output"]) == (3, 8, 6) for case in cases)
    assert all(len(case["samples"]) == 2 and min(case["samples"]) > 0 for case in cases)
    assert bf16["ratio_bf16"] == 1
    assert ours["ratio_bf16"] == pytest.approx(ours["tokens_per_s"] / bf16["tokens_per_s"])
    assert set(ours["compiled_meanwhile"].values()) == {0}


@pytest.mark.full
def test_engines_with_drafts_tell_what_a_step_brought(tmp_path: Path):
    out = tmp_path / "spec.json"
    drafts = (
        '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}'
    )
    line = ["bench", "rollout", "--checkpoint", str(EARLY), "--variants", "blockfp8", "--out", str(out)]
    line += [
        "--cases",
        "2x40x24",
        "--repeats",
        "2",
        "--kv-gib",
        "0.05",
        "--period",
        "8",
        "--drafts",
        "{}",
        drafts,
    ]
    bench([*line, "--engine", '{"enforce_eager": true}'])
    plain, drafting = json.loads(out.read_text())["cases"]
    assert "drafts" not in plain
    assert "tokens_per_step" not in plain
    assert drafting["drafts"] == json.loads(drafts)
    assert 1 < drafting["tokens_per_step"] <= 4
    assert (plain["period"], drafting["period"]) == (8, 8)
    assert len(drafting["samples"]) == 2


@pytest.mark.full
@pytest.mark.fp8_kv
def test_engines_one_after_the_other_tell_what_they_compiled(tmp_path: Path):
    """Fingerprints of the ranks of one with an FP8 KV cache are larger than the integers of vLLM's messages, which an engine
    of its own process sends."""
    out = tmp_path / "rollout.json"
    line = ["bench", "rollout", "--checkpoint", str(EARLY), "--variants", "blockfp8", "--kv", "auto", "fp8"]
    line += ["--apart", "--cases", "2x8x4", "--repeats", "1", "--kv-gib", "0.05", "--out", str(out)]
    bench([*line, "--engine", '{"enforce_eager": true}'], VLLM_ENABLE_V1_MULTIPROCESSING="1")
    cases = json.loads(out.read_text())["cases"]
    assert [(case["kv_cache"], len(case["samples"])) for case in cases] == [("auto", 1), ("fp8", 1)]
    assert all(set(case["compiled_meanwhile"].values()) == {0} for case in cases)


@pytest.mark.full
def test_distributions_of_output_layers_are_compared(tmp_path: Path):
    out = tmp_path / "lm_head.json"
    settings = [json.dumps({"staging": "none", "lm_head": head}) for head in ("bf16", "fp32", "blockfp8")]
    line = ["bench", "rollout", "--checkpoint", str(EARLY), "--variants", "blockfp8", "--cases", "2x40x4"]
    line += ["--settings", *settings, "--repeats", "1", "--kv-gib", "0.05", "--divergence", "3x40"]
    bench([*line, "--engine", '{"enforce_eager": true}', "--out", str(out)])
    bf16, fp32, blockfp8 = json.loads(out.read_text())["cases"]
    assert (bf16["kl"], bf16["same_choice"]) == (0, 1), "the same engine, read again"
    assert 0 < fp32["kl"] < 1e-4 < blockfp8["kl"] < 0.01
    assert min(case["tokens_per_s"] for case in (bf16, fp32, blockfp8)) > 0


@pytest.mark.parametrize("wrong", ["8", "0x512", "8x1", "8x99999", "-1x4"])
def test_prompts_to_compare_that_are_none(wrong: str):
    with pytest.raises(ConfigError, match=f"--divergence: expected PROMPTSxTOKENS .* found '{wrong}'"):
        CliRunner().invoke(cli, ["bench", "rollout", f"--divergence={wrong}"], catch_exceptions=False)


@pytest.mark.full
def test_engines_whose_requests_are_followed_by_new_ones(tmp_path: Path):
    out = tmp_path / "steady.json"
    line = ["bench", "rollout", "--checkpoint", str(EARLY), "--variants", "blockfp8", "--steady", "0.5"]
    line += ["--cases", "3x8x6", "--repeats", "2", "--kv-gib", "0.05", "--out", str(out)]
    bench([*line, "--engine", '{"enforce_eager": true}'])
    (case,) = json.loads(out.read_text())["cases"]
    assert (case["load"], case["seconds"], case["preemptions"]) == ("steady", 0.5, 0)
    assert 2 < case["running"] <= 3, "a new one for each that is done"
    assert len(case["samples"]) == 2
    assert min(case["samples"]) > 0
    assert case["ms_per_step"] > 0
    assert "first_token_ms" not in case


@pytest.mark.parametrize(
    "wrong",
    [["0"], ["nan"], ["inf"], ["5", "--profile", "profile.txt"]],
    ids=["nothing", "nan", "inf", "profile"],
)
def test_a_steady_load_that_is_none(wrong: list[str]):
    with pytest.raises(ConfigError, match="--steady: expected more than 0 seconds and no --profile, found"):
        CliRunner().invoke(cli, ["bench", "rollout", "--steady", *wrong], catch_exceptions=False)


@pytest.mark.parametrize("case", ["8x512", "axbxc", "0x8x8", "1x8x1"])
def test_a_case_that_is_none(case: str):
    with pytest.raises(ConfigError, match=f"--cases: expected .* found '{case}'"):
        CliRunner().invoke(cli, ["bench", "rollout", "--cases", case], catch_exceptions=False)


def test_engines_that_lend_memory_are_not_profiled(tmp_path: Path):
    line = ["bench", "rollout", "--lend", "--profile", str(tmp_path / "profile.txt")]
    with pytest.raises(ConfigError, match=r"--lend: expected no --profile.*take --apart"):
        CliRunner().invoke(cli, line, catch_exceptions=False)


@pytest.mark.parametrize("command", ["kernels", "rollout", "kv"])
def test_without_a_gpu(command: str):
    with pytest.raises(ConfigError, match="expected a CUDA GPU, found none"):
        CliRunner().invoke(cli, ["bench", command], catch_exceptions=False)


def test_updates_take_turns_with_baselines(tmp_path: Path):
    out = tmp_path / "update.json"
    line = ["bench", "update", "--shape", "tiny", "--transports", "files", "http", "--repeats", "2"]
    line += [
        "--serve",
        "enforce-eager",
        "kv-cache-memory-bytes=67108864",
        "--dir",
        str(tmp_path),
        "--together",
    ]
    done = CliRunner().invoke(cli, [*line, "--out", str(out)])
    assert done.exit_code == 0, done.output
    cases = json.loads(out.read_text())["cases"]
    told = [(case["transport"], case["variant"]) for case in cases]
    assert told == [(way, variant) for way in ("files", "http") for variant in ("blockfp8", "bare")]
    for ours, bare in zip(cases[::2], cases[1::2], strict=True):
        assert bare["bytes"] == ours["bytes"] > 0
        assert len(bare["samples"]) == len(ours["samples"]) == 2
        assert ours["ratio_bare"] == pytest.approx(ours["total_seconds"] / bare["total_seconds"])
        assert "ratio_bare" not in bare


@pytest.mark.full
@pytest.mark.fp8_kv
def test_long_responses_with_and_without_an_fp8_kv_cache(tmp_path: Path):
    out = tmp_path / "kv.json"
    line = ["bench", "kv", "--checkpoint", str(EARLY), "--cases", "6x16x200"]
    line += ["--variants", "blockfp8", "bf16", "blockfp8_kv"]
    line += ["--repeats", "2", "--gpu-memory-utilization", "0.3", "--out", str(out)]
    # K and V of 3 layers, 2 heads of 64 channels: 1,536 bytes a token in BF16
    line += [
        "--engine",
        json.dumps({"enforce_eager": True, "kv_cache_memory_bytes": 1536 * 512, "block_size": 32}),
    ]
    for seconds in (3, 20, 80):  # a busy machine may need longer until the cache is full
        bench([*line, "--seconds", str(seconds)])
        found = json.loads(out.read_text())
        weights, bf16, ours = found["cases"]
        if bf16["preemptions"]:
            break
    assert found["provenance"]["versions"]["vllm-fp8ext"]
    assert [(case["variant"], case["staging"]) for case in (bf16, weights, ours)] == [
        ("bf16", "none"),
        ("blockfp8", "shadow"),
        ("blockfp8_kv", "shadow"),
    ]
    assert bf16["kv_tokens"] == weights["kv_tokens"] == 512
    assert ours["kv_tokens"] == 1024
    # six responses need 700 tokens on average, half way
    assert bf16["preemptions"] > 0
    assert bf16["running"] < ours["running"]
    assert all(len(case["samples"]) == 2 and min(case["samples"]) > 0 for case in found["cases"])
    assert bf16["ratio_bf16"] == 1
    for case in (weights, ours):
        assert case["ratio_bf16"] == pytest.approx(case["tokens_per_s"] / bf16["tokens_per_s"])


@pytest.mark.parametrize("case", ["8x512", "axbxc", "8x8x0"])
def test_a_case_of_long_responses_that_is_none(case: str):
    with pytest.raises(ConfigError, match=f"--cases: expected .* found '{case}'"):
        CliRunner().invoke(cli, ["bench", "kv", "--cases", case], catch_exceptions=False)
