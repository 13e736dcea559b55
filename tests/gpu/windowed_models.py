# SPDX-License-Identifier: Apache-2.0
"""Random models of which every second layer has a sliding window: Gemma 2, with heads of 256 and soft caps, and gpt-oss, with
heads of 64 and sinks."""

from pathlib import Path
from typing import Any

import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, GptOssConfig, GptOssForCausalLM

LAYERS = 4
SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": LAYERS,
    "vocab_size": 2048,
    "max_position_embeddings": 2048,
    "sliding_window": 50,
    "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
}
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "Gemma 2": (
        Gemma2ForCausalLM,
        Gemma2Config,
        {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256},
    ),
    "gpt-oss": (
        GptOssForCausalLM,
        GptOssConfig,
        {
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
}


def write(name: str, folder: Path) -> None:
    """Write a checkpoint in BF16."""
    torch.manual_seed(0)
    model, config, sizes = MODELS[name]
    made = model(config(**SHAPE, **sizes))
    for part, parameter in made.named_parameters():
        if part.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    made.to(torch.bfloat16).save_pretrained(folder)
