# SPDX-License-Identifier: Apache-2.0
"""`fp8ext plan`: what it prints, for people and for programs."""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from page_blocks import blocks, commands
from transformers import MistralConfig, Qwen3MoeConfig

from vllm_fp8ext.bench.generated import SHAPES
from vllm_fp8ext.checkpoints import EARLY
from vllm_fp8ext.cli import cli
from vllm_fp8ext.config import GIB
from vllm_fp8ext.errors import ConfigError


@pytest.fixture
def qwen8b(tmp_path: Path) -> str:
    folder = tmp_path / "Qwen3-8B"
    folder.mkdir()
    config = {"model_type": "qwen3", "max_position_embeddings": 40960, **SHAPES["Qwen3-8B"]}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def plan(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["plan", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_page_shows_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command, output = (block.text for block in blocks() if block.page == "docs/plan.md")
    config = {"model_type": "qwen3", "max_position_embeddings": 40960, **SHAPES["Qwen3-8B"]}
    _, words = next(commands(command))
    folder = tmp_path / words[2]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    assert plan(*words[2:]).split() == output.split()


def planned(*arguments: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(plan(*arguments, "--json"))
    return loaded


def cells(text: str) -> list[list[str]]:
    """The table's rows, without its head."""
    lines = [line for line in text.splitlines() if line.strip().startswith(("BF16 ", "FP8 "))]
    return [line.replace(" + ", "+").split() for line in lines if "GiB" not in line]


def test_the_table(qwen8b: str) -> None:
    text = plan(qwen8b, "--gpu", "H200", "--context", "20480")
    assert "Qwen3-8B on H200: batches of 20,480 tokens" in text
    assert "139.80 GiB × 0.92, of which activations and graphs about 2.33 (steps of 8192 tokens, 1024" in text
    result = cells(text)
    kinds = [("BF16", "BF16"), ("BF16", "FP8"), ("FP8", "BF16"), ("FP8", "FP8")]
    assert [(row[0], row[1]) for row in result] == [*kinds, ("FP8+shadow", "BF16"), ("FP8+shadow", "FP8")]
    assert result[0][2:5] == ["15.26", "–", "147,456"]
    assert result[5][2:5] == ["8.79", "8.79", "73,728"]
    assert [row[-1] for row in result] == ["1.00", "2.00", "1.06", "2.12", "0.98", "1.96"]
    assert "does not fit" not in text


def test_table_and_json_say_the_same(qwen8b: str) -> None:
    arguments = (qwen8b, "--gpu", "H200", "--context", "20480")
    table, data = cells(plan(*arguments)), planned(*arguments)
    for row, actual in zip(table, data["rows"], strict=True):
        expected = [f"{actual[key]:,}" for key in ("kv_bytes_per_token", "blocks", "tokens", "batch")]
        assert row[4:8] == expected
        assert row[8] == f"{actual['ratio']:.2f}"
    assert (data["gpu"], data["serving"]["context"]) == ("H200", 20480)
    assert data["overhead_bytes"] == pytest.approx(2.33 * GIB, rel=0.01)


def shown(width: int, *arguments: str) -> str:
    """What a terminal of that many columns is sent."""
    line = [sys.executable, "-P", "-m", "vllm_fp8ext.cli", "plan", *arguments]
    main, side = os.openpty()
    with subprocess.Popen(
        line, stdout=side, env={**os.environ, "COLUMNS": str(width), "NO_COLOR": "1"}
    ) as done:
        os.close(side)
        seen = b""
        with contextlib.suppress(OSError):  # as Linux tells that the other side is closed
            while part := os.read(main, 4096):
                seen += part
    os.close(main)
    assert done.returncode == 0
    return re.sub(r"\x1b\[[0-9;]*m", "", seen.decode())


def test_no_digit_is_lost_in_a_narrow_terminal(qwen8b: str) -> None:
    arguments = (qwen8b, "--memory-gib", "20000", "--context", "2048")
    narrow, piped = shown(60, *arguments), plan(*arguments)
    assert "…" not in narrow
    table = narrow.partition("GiB of weights")[0]
    assert max(map(len, table.splitlines())) <= 60
    assert sorted(filter(str.isdigit, narrow)) == sorted(filter(str.isdigit, piped))


def test_the_table_is_as_wide_as_it_needs_to_be_where_nobody_has_a_terminal(
    qwen8b: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    arguments = (qwen8b, "--memory-gib", "20000", "--context", "2048")
    text = plan(*arguments)
    for row in planned(*arguments)["rows"]:
        assert f" {row['tokens']:,} " in text
    assert len(cells(text)) == 6


def test_what_does_not_fit_is_said_by_how_much(qwen8b: str) -> None:
    arguments = (qwen8b, "--memory-gib", "15", "--context", "20480")
    text = plan(*arguments)
    lacking = [row for row in planned(*arguments)["rows"] if row["short_bytes"]]
    assert [bool(row["twin_bytes"]) for row in lacking] == [False, False, True, True]
    assert {row["weights"] for row in lacking[:2]} == {"bf16"}
    for row in lacking:
        assert f"does not fit: {row['short_bytes'] / GIB:.2f} GiB short of one request" in text
    assert [row["ratio"] for row in planned(*arguments)["rows"]] == [None] * 6


def test_options_are_handed_on(qwen8b: str) -> None:
    arguments = ["--gpu", "H100", "--tp", "2", "--gpu-memory-utilization", "0.5", "--block-size", "32"]
    arguments += ["--max-num-batched-tokens", "4096", "--max-num-seqs", "64", "--memory-gib", "90"]
    assert planned(qwen8b, *arguments)["serving"] == {
        "context": 40960,
        "total": 90 * GIB,
        "utilization": 0.5,
        "kv_bytes": None,
        "tp": 2,
        "block_size": 32,
        "batched_tokens": 4096,
        "seqs": 64,
    }
    assert "tensor parallel 2, each rank" in plan(qwen8b, *arguments)


def test_a_cache_of_a_named_size_needs_no_gpu() -> None:
    arguments = (str(EARLY), "--kv-cache-memory-bytes", str(64 << 20))
    assert "early on 67,108,864 bytes of KV cache" in plan(*arguments)
    data = planned(*arguments)
    assert (data["gpu"], data["serving"]["total"]) == (None, None)
    assert data["rows"][0]["blocks"] == (64 << 20) // (3 * 2 * 2 * 64 * 2 * 16)


@pytest.mark.parametrize(("name", "warned"), [("A100-80GB", True), ("H100", False), ("B200", False)])
def test_a_gpu_without_fp8_is_told(qwen8b: str, name: str, warned: bool) -> None:
    told = "on A100-80GB only the rows of BF16 weights can be had"
    assert (told in plan(qwen8b, "--gpu", name)) == warned


def test_notes(tmp_path: Path) -> None:
    small = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    for config, note in (
        (MistralConfig(**small, sliding_window=64), "2 of 2 layers keep a sliding window only"),
        (Qwen3MoeConfig(**small, num_experts=4), "Experts divided among the ranks by their width"),
    ):
        config.save_pretrained(tmp_path)
        assert note in plan(str(tmp_path), "--gpu", "H100", "--context", "256", "--tp", "2")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--gpu", "TPU"], "unknown GPU 'TPU'"),
        ([], "which GPU"),
        (["--gpu", "H200", "--context", "4096"], "--context 4096: .* takes 2048 tokens at most"),
        (["--gpu", "H200", "--tp", "3"], "--tp 3 does not divide 4 heads"),
    ],
)
def test_refused(arguments: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        CliRunner().invoke(cli, ["plan", str(EARLY), *arguments], catch_exceptions=False)


def test_a_name_that_the_hub_can_not_be_asked_for() -> None:
    """One line and no traceback, without a network."""
    line = [sys.executable, "-P", "-m", "vllm_fp8ext.cli", "plan", "nobody/nothing", "--gpu", "H200"]
    done = subprocess.run(line, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
    assert done.returncode == 1
    said = " ".join(done.stderr.split())
    assert "fp8ext: 'nobody/nothing' is no folder here, and the Hub gave no config: " in said
    assert "Traceback" not in said
