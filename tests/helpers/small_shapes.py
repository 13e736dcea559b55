# SPDX-License-Identifier: Apache-2.0
"""Every shape of `model_shapes` with few layers and few columns, for CPUs."""

from typing import Any

from vllm_fp8ext.bench.model_shapes import MODEL_SHAPES

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "sliding_window": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
TOWER = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 256}
MORE: dict[str, dict[str, Any]] = {
    "Gemma-3-12B": {"layer_types": ["sliding_attention", "full_attention"], "num_key_value_heads": 4},
    "Qwen3.5-9B": {"layer_types": ["linear_attention", "full_attention"]},
    "gpt-oss-20B": {"layer_types": ["sliding_attention", "full_attention"]},
    "Qwen2.5-VL-7B": {
        "image_token_id": 500,
        "video_token_id": 501,
        "vision_start_token_id": 502,
        "vision_end_token_id": 503,
    },
    "DeepSeek-V2-Lite": {"num_key_value_heads": 4},
    "Moonlight-16B-A3B": {"num_key_value_heads": 4},
}


def small(name: str) -> dict[str, Any]:
    """Return a shape's architecture with small sizes; heads stay as they are."""
    shape = _with(MODEL_SHAPES[name], SIZES)
    if "text_config" in shape:
        text = _with(shape["text_config"], {**SIZES, "num_attention_heads": 2, "num_key_value_heads": 1})
        tower = {**shape["vision_config"], **TOWER, "fullatt_block_indexes": [1]}
        shape |= {"text_config": text, "vision_config": tower}
    return {**shape, **MORE.get(name, {})}


def _with(shape: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    return {**shape, **{key: size for key, size in sizes.items() if key in shape}}
