# SPDX-License-Identifier: Apache-2.0
"""Graphs of whole steps with as many requests as there can be."""

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest

pytestmark = pytest.mark.gpu


def test_a_crowd_is_answered_as_in_pieces(tmp_path: Path) -> None:
    """Steps that mix prompts and over 200 requests that decode, one of them with a longer context than prompts may have; and
    nothing is compiled for any of them."""
    from vllm_fp8ext.bench.generated import write_checkpoint

    write_checkpoint(tmp_path / "model", "Qwen3-0.6B", 0, "cuda")
    story = Path(__file__).with_name("crowd_story.py")
    running = {}
    for mode in ("whole", "pieces", "eager"):
        line = [
            sys.executable,
            "-P",
            str(story),
            mode,
            str(tmp_path / "model"),
            str(tmp_path / f"{mode}.json"),
        ]
        own = {**os.environ, "DG_JIT_CACHE_DIR": str(tmp_path / f"{mode} kernels")}  # counted
        with (tmp_path / f"{mode}.log").open("w") as log:
            running[mode] = subprocess.Popen(line, stdout=log, stderr=log, env=own)
    for mode, process in running.items():
        assert process.wait(900) == 0, (tmp_path / f"{mode}.log").read_text()[-4000:]
    found = {mode: json.loads((tmp_path / f"{mode}.json").read_text()) for mode in running}
    whole, pieces, eager = found.values()
    assert len(whole["whole"]) >= 27, "every step in which requests join"
    assert max(whole["whole"]) == 256
    assert pieces["whole"] == eager["whole"] == []
    for one in (whole, pieces):
        assert one["compiled before"] == one["compiled after"]
        assert one["compiled before"]["deep_gemm"] > 0
    assert len(whole["logprobs"]) == 221
    assert _apart(whole["logprobs"], pieces["logprobs"]) < 0.1 * _apart(eager["logprobs"], pieces["logprobs"])


def _apart(one: list[list[float]], other: list[list[float]]) -> float:
    """Mean difference of the tokens' log-probabilities."""
    pairs = zip(one, other, strict=True)
    return mean(abs(a - b) for first, second in pairs for a, b in zip(first, second, strict=True))
