# SPDX-License-Identifier: Apache-2.0
"""Engines beside each other that have memory for K and V in turn."""

import contextlib

import pytest
import torch

from vllm_fp8ext.bench.engines import Engine
from vllm_fp8ext.checkpoints import LATE

pytestmark = pytest.mark.gpu

KV_BYTES = 4 << 30
TAKEN = KV_BYTES * 9 // 10
"""Of that at least: an engine's other memory grows and shrinks."""
ENGINE = {
    "quantization": "blockfp8",
    "enforce_eager": True,
    "kv_cache_memory_bytes": KV_BYTES,
    "gpu_memory_utilization": 0.1,
}


def test_an_engine_that_lends_has_memory_for_k_and_v_in_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with contextlib.closing(Engine(LATE, "lends", ENGINE, lends=True)) as engine:
        engine.wait()
        for seed in range(2):
            before = torch.cuda.mem_get_info()[0]
            with engine.turn():
                assert engine.seconds(2, 16, 4, seed) > 0
                assert before - torch.cuda.mem_get_info()[0] > TAKEN
            assert torch.cuda.mem_get_info()[0] - before > -(KV_BYTES - TAKEN)
