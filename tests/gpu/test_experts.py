# SPDX-License-Identifier: Apache-2.0
"""Experts on a Hopper GPU: every kernel in the shape of Qwen3-30B-A3B against the reference, and a real engine.
`tests/kernels` has the kernels' edge cases, on the GPU where there is one."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

from vllm_fp8ext.kernels.moe.expert_configs import TILE_CONFIGS, ExpertChoice
from vllm_fp8ext.kernels.moe.expert_error import experts_error
from vllm_fp8ext.kernels.testing import hard_cases, kernel_cases
from vllm_fp8ext.layers.expert_kernels import EXPERT_KERNELS

pytestmark = pytest.mark.gpu

EXPERTS, CHOSEN, HIDDEN, WIDTH = 128, 8, 2048, 768
TOKENS = (1, 3, 8, 64, 256, 2048)
WIDTHS = 768, 192
"""Of experts in an engine."""
KERNELS = (*(name for name in EXPERT_KERNELS if name != "fused"), *range(len(TILE_CONFIGS)))
"""vLLM's by name, ours by the number of its tile config."""
CASES = [
    (kernel, tokens) for kernel in KERNELS for tokens in TOKENS if tokens <= 256 or isinstance(kernel, str)
]


@pytest.fixture(scope="module")
def layer() -> hard_cases.ExpertCase:
    return hard_cases.experts(max(TOKENS), HIDDEN, WIDTH, EXPERTS, CHOSEN, "cuda")


def routed(tokens: int, kind: str) -> tuple[Tensor, Tensor]:
    """Weights and experts of each token. `ragged`: most go to a few experts; `remote`: half of the experts are elsewhere."""
    weights, of = kernel_cases.routing(tokens, EXPERTS, CHOSEN, "cuda", seed=tokens)
    if kind == "ragged":
        noise = torch.Generator("cuda").manual_seed(tokens)
        lean = torch.linspace(0, 6, EXPERTS, device="cuda")
        of = (torch.randn(tokens, EXPERTS, generator=noise, device="cuda") + lean).topk(CHOSEN, 1)[1].int()
    if kind == "remote":
        of = torch.where(of < EXPERTS // 2, of, -1)
    return weights, of


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["uniform", "ragged", "remote"])
@pytest.mark.parametrize(("kernel", "tokens"), CASES)
def test_each_kernel_is_the_reference(
    layer: hard_cases.ExpertCase, kernel: str | int, tokens: int, kind: str
) -> None:
    from vllm_fp8ext.layers.expert_gemm import ExpertWeights, compute

    choice = (
        ExpertChoice("fused", TILE_CONFIGS[kernel][1])
        if isinstance(kernel, int)
        else ExpertChoice(kernel, None)
    )
    x, routing, weights = layer.x_MK[:tokens], routed(tokens, kind), ExpertWeights(*layer[1:5])
    outs = [compute(choice, x, weights, *routing, "silu", "fp32") for _ in range(2)]
    assert experts_error(outs[0], x, *weights, *routing, "silu", "fp32") < 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs.append(compute(choice, x, weights, *routing, "silu", "fp32"))
    for _ in range(3):
        graph.replay()
    assert all(torch.equal(outs[0], out) for out in outs)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two checkpoints of a small Qwen3-MoE with experts as wide as in Qwen3-30B-A3B, and two that pad theirs."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = tmp_path_factory.mktemp("mixtures")
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    for width in WIDTHS:
        experts = {"moe_intermediate_size": width, "num_experts": 16, "num_experts_per_tok": 4}
        config = Qwen3MoeConfig(
            hidden_size=512, intermediate_size=256, num_hidden_layers=2, vocab_size=512, **heads, **experts
        )
        for seed, name in enumerate(("early", "late")):
            torch.manual_seed(seed)
            Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(folder / f"{name}{width}")
    return {path.name: path for path in folder.iterdir()}


def scenario(early: Path, late: Path, out: Path, cache: Path, more: dict[str, Any]) -> dict[str, Any]:
    """`cache`: where DeepGEMM keeps kernels, and those that are there are counted."""
    # whoever skips the warm-up elsewhere does not here
    env = {**os.environ, "DG_JIT_CACHE_DIR": str(cache), "VLLM_DEEP_GEMM_WARMUP": "relax"}
    line = [sys.executable, "-P", str(Path(__file__).with_name("experts_scenario.py"))]
    done = subprocess.run(
        [*line, str(early), str(late), str(out), json.dumps(more)],
        capture_output=True,
        text=True,
        timeout=590,
        env=env,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    loaded: dict[str, Any] = json.loads(out.read_text())
    lines = (done.stdout + done.stderr).splitlines()
    loaded["compiled late"] = [line for line in lines if "JIT compilation" in line]
    loaded["graphs"] = [line for line in lines if "replay CUDA graphs" in line]
    return loaded


Scenarios: TypeAlias = dict[tuple[str, int], dict[str, Any]]
"""What engines saw that began on the early or on the late checkpoint of a width."""


def told(checkpoints: dict[str, Path], folder: Path, more: dict[str, Any]) -> Scenarios:
    """All at the same time."""
    keys = [(name, width) for width in WIDTHS for name in ("early", "late")]

    def one(key: tuple[str, int]) -> dict[str, Any]:
        name, width = key
        served, late = checkpoints[f"{name}{width}"], checkpoints[f"late{width}"]
        return scenario(served, late, folder / f"{name}{width}.json", folder / f"kernels{width}", more)

    with ThreadPoolExecutor() as pool:
        return dict(zip(keys, pool.map(one, keys), strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scenarios")


@pytest.fixture(scope="module")
def scenarios(checkpoints: dict[str, Path], folder: Path) -> Scenarios:
    return told(checkpoints, folder, {})


@pytest.fixture(scope="module", params=[False, True], ids=["tensor parallel", "expert parallel"])
def scenarios_of_two(
    request: pytest.FixtureRequest,
    checkpoints: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Scenarios:
    """Of engines of two ranks."""
    together = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    more = {**together, "disable_custom_all_reduce": True, "enable_expert_parallel": request.param}
    return told(checkpoints, tmp_path_factory.mktemp("scenarios"), more)


@pytest.mark.parametrize("width", WIDTHS)
def test_an_update_in_an_engine_serves_what_a_cold_start_serves(
    width: int, checkpoints: dict[str, Path], scenarios: Scenarios
) -> None:
    require_equal_to_a_cold_start(width, checkpoints, scenarios)


def test_large_steps_say_the_same_in_graphs(
    checkpoints: dict[str, Path], folder: Path, scenarios: Scenarios
) -> None:
    """A prompt of 3,000 tokens: its experts are DeepGEMM's."""
    early, settings = checkpoints["early768"], {"fp8ext": {"kernels": {"graph_tokens": 0}}}
    files = folder / "apart.json", folder / "kernels768"
    apart = scenario(early, early, *files, {"additional_config": settings})
    facts = scenarios["early", 768]
    assert not apart["graphs"]
    assert any("to 4096 tokens replay" in line for line in facts["graphs"])
    assert facts["long"] == apart["long"]


@pytest.mark.multigpu
@pytest.mark.parametrize("width", WIDTHS)
def test_so_it_does_on_two_ranks(
    width: int, checkpoints: dict[str, Path], scenarios_of_two: Scenarios
) -> None:
    require_equal_to_a_cold_start(width, checkpoints, scenarios_of_two)


def require_equal_to_a_cold_start(width: int, checkpoints: dict[str, Path], scenarios: Scenarios) -> None:
    from vllm_fp8ext.update.contract.manifest import Manifest
    from vllm_fp8ext.update.worker.digest import checkpoint_digests

    early, late = checkpoints[f"early{width}"], checkpoints[f"late{width}"]
    facts, cold = scenarios["early", width], scenarios["late", width]
    manifest = Manifest.from_dict(facts["manifest"])
    for name, path in (("cold digests", early), ("late digests", late), ("early digests", early)):
        assert facts[name]["digests"] == checkpoint_digests(path, manifest), name
    assert facts["late digests"]["digests"] == cold["cold digests"]["digests"]
    assert facts["late"] == cold["early"]
    assert facts["early again"] == facts["early"]
    assert facts["late"] != facts["early"]
    assert facts["verified"] == "some experts"
    assert facts["compiled before"] == facts["compiled after"], facts["compiled late"]
