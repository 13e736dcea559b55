# SPDX-License-Identifier: Apache-2.0
"""What a compiled model launches on a GPU: no quantization of activations stands alone but that of what FlashAttention makes
of prompts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

LAYERS = 28
JOINED = {
    *("rmsnorm_linear 4096x1024", "norm_rope 0x0", "quantized_room 0x0", "quantized_linear 1024x2048"),
    *("rmsnorm_linear 6144x1024", "gated_linear 1024x3072"),
}
"""In the shape of Qwen3-0.6B: Q, K and V, what stands between them and attention, where attention writes, `o_proj`; gate and
up; down."""


def test_a_real_model(tmp_path: Path) -> None:
    from vllm_fp8ext.bench.generated import write_checkpoint

    write_checkpoint(tmp_path / "model", "Qwen3-0.6B", 0, "cuda")
    scenario, facts = Path(__file__).with_name("graph_scenario.py"), tmp_path / "facts.json"
    variables = os.environ | {
        "VLLM_DISABLE_COMPILE_CACHE": "1",  # every graph passes through the pass,
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),  # those alike once
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_DEEP_GEMM_WARMUP": "skip",
    }
    line = [sys.executable, "-P", str(scenario), str(tmp_path / "model"), str(facts)]
    try:
        done = subprocess.run(line, env=variables, capture_output=True, text=True, timeout=570)
    except subprocess.TimeoutExpired as late:
        pytest.fail((late.stderr or b"").decode()[-4000:] + str(late))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    loaded = json.loads(facts.read_text())
    assert set(loaded["graphs"]) == JOINED
    prompts = {"prefill": LAYERS, "many small": LAYERS}
    assert loaded["quantized"] == {**prompts, "many that decode": 0, "decode": 0}
