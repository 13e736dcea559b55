# SPDX-License-Identifier: Apache-2.0
"""Updates reach, inside CUDA graphs, what vLLM derives of weights, and experts in 16 bits: outputs are a cold start's.

Each cell runs two small engines at once, and ends within `SECONDS`.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, GptOssConfig, GptOssForCausalLM

SECONDS = 170
"""Most that both engines of a cell may take."""
LINES = 60
"""Of each engine's log, if it fails."""
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(SECONDS + 60)]

SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "vocab_size": 128,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 1024,
}
LATENT: dict[str, Any] = {
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 256,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    # without these vLLM gives routers no bias, which the checkpoint has
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
SCALES = {"policy": "calibrate", "prompts": [[7 + (3 * place) % 90 for place in range(200)]]}
KERNELS = {"shapes": {"*": {"gemm": "triton"}}, "experts": {"gemm": "triton"}, "graph_tokens": 0}
"""Kernels that compile in a second; DeepGEMM's take ten each."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "latent attention": ("deepseek", {}),
    "FlashMLA": ("deepseek", {"attention_backend": "FLASHMLA"}),
    "FlashMLA, FP8": ("deepseek", {"attention_backend": "FLASHMLA", "kv_cache_dtype": "fp8"}),
    "Triton, FP8": ("deepseek", {"attention_backend": "TRITON_MLA", "kv_cache_dtype": "fp8"}),
    "FlashMLA, FP8, scales of the trainer": (
        "deepseek",
        {"attention_backend": "FLASHMLA", "kv_cache_dtype": "fp8", "provided": True},
    ),
    "experts in 16 bits": ("gpt-oss", {"expert_layout": "in_out"}),
}


def write(kind: str, folder: Path, seed: int) -> None:
    torch.manual_seed(seed)
    if kind == "deepseek":
        made: Any = DeepseekV3ForCausalLM(DeepseekV3Config(**SHAPE, **LATENT))
        for name, bias in made.named_buffers():
            if name.endswith("e_score_correction_bias"):
                bias.uniform_(0, 0.2)
    else:
        heads = {"num_key_value_heads": 2, "head_dim": 64, "num_local_experts": 4}
        windows = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2}
        made = GptOssForCausalLM(GptOssConfig(**SHAPE | heads | windows | {"num_hidden_layers": 4}))
    for name, parameter in made.named_parameters():
        if "kv_b_proj" in name:  # what decoding makes of it shows in the answers
            parameter.data.mul_(20)
        elif parameter.dim() > 1:
            parameter.data.mul_(2)
    made.bfloat16().save_pretrained(folder)


def run(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """What both engines saw, which start at once."""
    scenario, variables = Path(__file__).with_name("latent_scenario.py"), {"VLLM_DEEP_GEMM_WARMUP": "skip"}
    end, running = time.monotonic() + SECONDS, {}
    for role in ("cold", "live"):
        line = [sys.executable, "-P", str(scenario), role, str(folder), json.dumps(options)]
        with (folder / f"{role}.log").open("wb") as log:
            running[role] = subprocess.Popen(
                line, env=os.environ | variables, stdout=log, stderr=log, start_new_session=True
            )
    try:
        codes = {role: _ended(process, end) for role, process in running.items()}
    finally:
        for process in running.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    assert set(codes.values()) == {0}, "\n".join(
        [f"exit codes {codes} within {SECONDS} s", *(_log(folder, role) for role in running)]
    )
    facts: dict[str, Any] = json.loads((folder / "live.json").read_text())
    of_cold = json.loads((folder / "cold.json").read_text())
    return facts | {f"cold {name}".replace("cold cold", "cold"): value for name, value in of_cold.items()}


def _ended(process: "subprocess.Popen[bytes]", end: float) -> int | str:
    try:
        return process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return "still running"


def _log(folder: Path, role: str) -> str:
    """The first error that an engine told, and the end of its log."""
    lines = (folder / f"{role}.log").read_text(errors="replace").splitlines()
    errors = [line for line in lines if "Error" in line and "Engine core initialization" not in line]
    return "\n".join([f"--- {role}, first of {len(errors)} errors:", *errors[:2], "---", *lines[-LINES:]])


@pytest.mark.parametrize("case", CASES)
def test_an_update_is_a_cold_start(case: str, tmp_path: Path) -> None:
    kind, options = CASES[case]
    for seed, name in enumerate(("early", "late")):
        write(kind, tmp_path / name, seed)
    settings: dict[str, Any] = {"kernels": KERNELS}
    if "kv_cache_dtype" in options:
        settings["kv_scales"] = SCALES
    graphs = {"cudagraph_capture_sizes": [1, 2, 4]}
    facts = run(tmp_path, {**options, **graphs, "additional_config": {"fp8ext": settings}})
    assert facts["digests"]
    if "kv_cache_dtype" in options:
        assert facts["scales"] == facts["cold scales"]
        assert any(scale != [1.0] for kinds in facts["scales"].values() for scale in kinds.values())
    assert facts["late"] == facts["cold"]
    assert facts["early"] == facts["rolled back"] != facts["late"]
