# SPDX-License-Identifier: Apache-2.0
"""A server without nvcc, or without DeepGEMM, serves on the next best kernels and says so."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

NO_NVCC = {"DG_JIT_NVCC_COMPILER": "/missing/nvcc", "CUDA_HOME": "/missing", "VLLM_DEEP_GEMM_WARMUP": "skip"}
NO_DEEP_GEMM = {"VLLM_USE_DEEP_GEMM": "0"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from vllm_fp8ext.bench.generated import write_checkpoint

    folder = tmp_path_factory.mktemp("weights") / "model"
    write_checkpoint(folder, "Qwen3-0.6B", 0, "cuda")
    return folder


@pytest.mark.parametrize(
    ("variables", "said"),
    [(NO_NVCC, "DeepGEMM does not run here, the next best kernels do"), (NO_DEEP_GEMM, "")],
    ids=["no nvcc", "no DeepGEMM"],
)
def test_it_serves_with_the_next_best(
    variables: dict[str, str], said: str, checkpoint: Path, tmp_path: Path
) -> None:
    scenario, facts = Path(__file__).with_name("kernels_scenario.py"), tmp_path / "facts.json"
    cached = {"DG_JIT_CACHE_DIR": str(tmp_path / "dg"), "VLLM_CACHE_ROOT": str(tmp_path / "vllm")}
    variables = os.environ | cached | variables | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    line = [sys.executable, "-P", str(scenario), str(checkpoint), str(facts)]
    done = subprocess.run(line, env=variables, capture_output=True, text=True, timeout=570)
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-6000:]
    loaded = json.loads(facts.read_text())
    assert loaded["gemms"] == ["cutlass"]
    assert all(math.isfinite(logprob) for logprob in loaded["logprobs"])
    assert said in log
    assert "DeepGEMM does not take 4096x1024 here, cutlass is the next best" in log
