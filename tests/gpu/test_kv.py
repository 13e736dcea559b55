# SPDX-License-Identifier: Apache-2.0
"""The FP8 KV cache on a Hopper GPU: kernels in a model's shape, CUDA graphs, and a real engine. `tests/kernels` has the
kernels' edge cases, on the GPU where there is one."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_fp8ext.kernels.attention.kv_amax import AmaxTally, kv_amax_reference
from vllm_fp8ext.kernels.attention.rescale_kv import CachedLayer, rescale_kv, rescale_kv_reference, warm_up
from vllm_fp8ext.kernels.testing import kernel_cases

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("ratios", [(1.5, 0.6), (500.0, 0.01), (2.0, 2.0)], ids=str)
def test_a_models_cache_is_rewritten_as_the_reference_does(ratios: tuple[float, float]) -> None:
    """NaN of both signs included; several launches' worth of programs; a layer that stays as it is between others."""
    memory = kernel_cases.kv_memory(5, 300, "cuda")
    memory[1, 7, 3, 5, :40] = 0x7F
    memory[1, 7, 3, 5, 40:90] = 0xFF
    copy = memory.clone()
    steps = torch.linspace(*ratios, kernel_cases.KV_HEADS)
    blocks = list(range(1, 300, 2))

    def layers(of: Tensor) -> list[CachedLayer]:
        one = torch.ones(kernel_cases.KV_HEADS)
        return [
            CachedLayer(*pair, *((one, one) if index == 2 else (steps, 1 / steps)))
            for index, pair in enumerate(kernel_cases.kv_views(of))
        ]

    warm_up(layers(memory))
    assert torch.equal(memory, copy)
    counts = rescale_kv(layers(memory), blocks)
    changed = [layer for layer in layers(copy) if not layer.unchanged]
    assert counts == rescale_kv_reference(changed, torch.tensor(blocks, device="cuda"))
    assert torch.equal(memory, copy)


@pytest.mark.parametrize("tokens", [1, 128, 8192])
def test_amaxes_of_a_models_layer(tokens: int) -> None:
    tally = AmaxTally(kernel_cases.KV_HEADS, torch.device("cuda"))
    scales = tuple(torch.full((), 0.01, device="cuda") for _ in range(3))
    slots = torch.arange(tokens, device="cuda")
    slots[::5] = -1
    steps = [kernel_cases.kv_step(tokens, "cuda", seed) for seed in range(2)]
    for step in steps:
        tally.add(step, slots, scales)
    seen = tally.take()
    for side, scale in enumerate(scales):
        both = torch.cat([step[side].float()[slots >= 0] for step in steps]).to(steps[0][side].dtype)
        amax, saturated = kv_amax_reference(both, scale)
        assert torch.equal(seen.amax[side], amax.cpu())
        assert torch.equal(seen.saturated[side], saturated.cpu())
        assert int(seen.elements[side]) == both[:, 0].numel()


def test_nothing_is_recorded_into_a_graph() -> None:
    from vllm_fp8ext.compat.update.kv_recorder import KvRecorder

    k, v, q = kernel_cases.kv_step(4, "cuda")
    scale = torch.ones((), device="cuda")
    impl = SimpleNamespace(forward=lambda module, query, key, value, cache, metadata: value + 1)
    layer: Any = SimpleNamespace(
        impl=impl,
        dtype=torch.bfloat16,
        query_quant=object(),
        num_heads=kernel_cases.Q_HEADS,
        num_kv_heads=kernel_cases.KV_HEADS,
        head_size=kernel_cases.HEAD_DIM,
        head_size_v=kernel_cases.HEAD_DIM,
        _k_scale=scale,
        _v_scale=scale,
        _q_scale=scale,
    )
    metadata = SimpleNamespace(slot_mapping=torch.arange(4, device="cuda"))
    recorder = KvRecorder({"layer": layer}, 1)
    impl.forward(layer, q, k, v, None, metadata)
    assert int(recorder.take()["layer"].elements[0]) == 4 * kernel_cases.HEAD_DIM
    impl.forward(layer, q, k, v, None, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = impl.forward(layer, q, k, v, None, metadata)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, v + 1)
    assert not recorder.take()["layer"].elements.any()


@pytest.mark.parametrize("kind", ["plain", "hybrid"])
def test_a_real_engine(kind: str, tmp_path: Path) -> None:
    """As `tests/compat` sees it on a CPU, but for what decoding in FP8 makes of finer scales."""
    scenario = Path(__file__).parents[1] / "compat" / "update" / "kv_scenario.py"
    line = [sys.executable, "-P", str(scenario), kind, str(tmp_path / "facts.json")]
    done = subprocess.run(line, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["views"]
    assert facts["compared"] > 20
    assert facts["values stay"]
    assert facts["rescaled"][1:] == [0, 0]
    for layers, _, blocks in facts["held"]:
        assert all(set(blocks) <= set(facts["written"][layer]) for layer in layers)
    for name in ("recorded", "recorded some"):
        assert facts[name]["equal"]
    assert facts["recorded some"]["saturated"] > 0
