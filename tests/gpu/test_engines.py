# SPDX-License-Identifier: Apache-2.0
"""Engines beside each other that have memory for K and V in turn."""

import contextlib
import threading
from pathlib import Path

import pytest
import torch

from vllm_fp8ext.bench.engines import Engine
from vllm_fp8ext.checkpoints import LATE

pytestmark = pytest.mark.gpu

KV_BYTES = 16 << 30
TAKEN = KV_BYTES * 9 // 10
"""Of that at least: an engine's other memory grows and shrinks."""
ENGINE = {
    "quantization": "blockfp8",
    "enforce_eager": True,
    "kv_cache_memory_bytes": KV_BYTES,
    "gpu_memory_utilization": 0.1,
}


def test_engines_that_lend_have_memory_for_k_and_v_in_turn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also while they start, side by side."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    made = (Engine(LATE, name, ENGINE, lends=tmp_path / "memory") for name in ("one", "other"))
    with contextlib.ExitStack() as stack:
        ready, taken = threading.Event(), [_taken()]
        watch = threading.Thread(target=lambda: _watch(taken, ready))
        watch.start()
        stack.callback(watch.join)
        stack.callback(ready.set)
        engines = [stack.enter_context(contextlib.closing(engine)) for engine in made]
        for engine in engines:
            engine.wait()
        ready.set()
        assert TAKEN < max(taken) - taken[0] < 2 * TAKEN
        for seed, engine in enumerate(engines * 2):
            before = _taken()
            with engine.turn():
                assert engine.seconds(2, 16, 4, seed) > 0
                assert _taken() - before > TAKEN
            assert _taken() - before < KV_BYTES - TAKEN


def _watch(taken: list[int], ready: threading.Event) -> None:
    while not ready.wait(0.02):
        taken.append(_taken())


def _taken() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free
