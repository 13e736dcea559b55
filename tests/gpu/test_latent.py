# SPDX-License-Identifier: Apache-2.0
"""Updates reach, inside CUDA graphs, what vLLM derives of weights, and experts in 16 bits: outputs are a cold start's."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, GptOssConfig, GptOssForCausalLM

pytestmark = pytest.mark.gpu

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
LATENT = {
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
}
SCALES = {"policy": "calibrate", "prompts": [[7 + (3 * place) % 90 for place in range(200)]]}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "latent attention": ("deepseek", {}),
    "latent attention, FlashMLA, FP8": (
        "deepseek",
        {"attention_backend": "FLASHMLA", "kv_cache_dtype": "fp8"},
    ),
    "latent attention, Triton, FP8": (
        "deepseek",
        {"attention_backend": "TRITON_MLA", "kv_cache_dtype": "fp8"},
    ),
    "experts in 16 bits": ("gpt-oss", {"expert_layout": "in_out"}),
}


def write(kind: str, folder: Path, seed: int) -> None:
    torch.manual_seed(seed)
    if kind == "deepseek":
        made: Any = DeepseekV3ForCausalLM(DeepseekV3Config(**SHAPE, **LATENT))
    else:
        heads = {"num_key_value_heads": 2, "head_dim": 64, "num_local_experts": 4}
        windows = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2}
        made = GptOssForCausalLM(GptOssConfig(**SHAPE | heads | windows | {"num_hidden_layers": 4}))
    for parameter in made.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(2)
    made.bfloat16().save_pretrained(folder)


@pytest.mark.parametrize("case", CASES)
def test_an_update_is_a_cold_start(case: str, tmp_path: Path) -> None:
    kind, options = CASES[case]
    for seed, name in enumerate(("early", "late")):
        write(kind, tmp_path / name, seed)
    if "kv_cache_dtype" in options:
        options = {**options, "additional_config": {"fp8ext": {"kv_scales": SCALES}}}
    variables = os.environ | {"VLLM_DEEP_GEMM_WARMUP": "skip"}
    scenario, facts = Path(__file__).with_name("latent_scenario.py"), tmp_path / "facts.json"
    line = [sys.executable, "-P", str(scenario), str(tmp_path), str(facts), json.dumps(options)]
    done = subprocess.run(line, env=variables, capture_output=True, text=True, timeout=570)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(facts.read_text())
    assert found["digests"]
    assert found["late"] == found["cold"]
    assert found["early"] == found["rolled back"] != found["late"]
