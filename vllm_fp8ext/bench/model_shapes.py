# SPDX-License-Identifier: Apache-2.0
"""Shapes of models that RL trains, beside Qwen3's, and their checkpoints' tensors.

The tensors are those of the model that transformers makes of the configuration, under the names that it saves them by.
"""

from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

import torch
import transformers
from torch import Tensor

ARCHITECTURE = "architecture"
"""Key of a shape: transformers' class. The others are what its configuration gets."""
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3_ROPE |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
QWEN2_5_7B = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "vocab_size": 152064}
QWEN2_5_7B |= {"num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False}
LATENT = {"kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
LATENT |= {"v_head_dim": 128, "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16}
LATENT |= {"num_key_value_heads": 16, "moe_intermediate_size": 1408, "n_routed_experts": 64}
LATENT |= {"num_experts_per_tok": 6, "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 1}
LATENT |= {"topk_group": 1, "tie_word_embeddings": False}

MODEL_SHAPES: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {
        ARCHITECTURE: "LlamaForCausalLM",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "vocab_size": 128256,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_parameters": LLAMA3_ROPE,
        "tie_word_embeddings": False,
    },
    "Llama-3.2-1B": {
        ARCHITECTURE: "LlamaForCausalLM",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "vocab_size": 128256,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rope_parameters": {**LLAMA3_ROPE, "factor": 32.0},
        "tie_word_embeddings": True,
    },
    "Qwen2.5-7B": {ARCHITECTURE: "Qwen2ForCausalLM", **QWEN2_5_7B},
    "Qwen2.5-VL-7B": {
        ARCHITECTURE: "Qwen2_5_VLForConditionalGeneration",
        "text_config": {
            **QWEN2_5_7B,
            "max_position_embeddings": 40960,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1000000.0,
                "mrope_section": [16, 24, 24],
            },
        },
        "vision_config": {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 3584,
            "patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
        "tie_word_embeddings": False,
    },
    "Gemma-3-12B": {
        ARCHITECTURE: "Gemma3ForCausalLM",
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 48,
        "vocab_size": 262208,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "sliding_window": 1024,
        "tie_word_embeddings": True,
    },
    "Qwen3.5-9B": {
        ARCHITECTURE: "Qwen3_5ForCausalLM",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "vocab_size": 248320,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "tie_word_embeddings": False,
    },
    "DeepSeek-V2-Lite": {
        ARCHITECTURE: "DeepseekV2ForCausalLM",
        **LATENT,
        "intermediate_size": 10944,
        "vocab_size": 102400,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
    "Moonlight-16B-A3B": {
        ARCHITECTURE: "DeepseekV3ForCausalLM",
        **LATENT,
        "intermediate_size": 11264,
        "vocab_size": 163840,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.446,
        "num_nextn_predict_layers": 0,
    },
    "gpt-oss-20B": {
        ARCHITECTURE: "GptOssForCausalLM",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "vocab_size": 201088,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "tie_word_embeddings": False,
    },
}
"""Shapes as their models were released; experts of gpt-oss in BF16, Gemma's text model alone, Qwen3.5's too."""

Kind: TypeAlias = Literal["matrix", "norm", "bias", "decay", "conv"]
"""How values of a tensor are distributed."""
ADDS_ONE = ("gemma3_text", "qwen3_5_text")
"""Types of models whose norms multiply by `1 + weight`; Qwen3.5's gated norm does not."""


def config_of(shape: dict[str, Any], positions: int) -> Any:
    """Make the configuration of a shape that names its architecture, for so many positions."""
    sizes = {name: size for name, size in shape.items() if name != ARCHITECTURE}
    made = getattr(transformers, shape[ARCHITECTURE])
    where = {} if "text_config" in sizes else {"max_position_embeddings": positions}
    return made.config_class(**sizes, **where, architectures=[shape[ARCHITECTURE]])


def tensors_of(config: Any) -> Iterator[tuple[str, tuple[int, ...], Kind]]:
    """Name the tensors of a checkpoint, in the order of the model: shape, and how its values are distributed."""
    from transformers.core_model_loading import revert_weight_conversion

    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])(config)
    for name, tensor in revert_weight_conversion(model, model.state_dict()).items():
        if not (name.endswith("lm_head.weight") and config.tie_word_embeddings):
            yield name, tuple(tensor.shape), kind_of(name, tensor)


def kind_of(name: str, tensor: Tensor) -> Kind:
    """Tell how values of a tensor of this name are distributed."""
    if name.endswith("A_log"):
        return "decay"
    if ("norm" in name or name.endswith("ln_q.weight")) and tensor.dim() == 1:
        return "norm"
    if "conv" in name:
        return "conv"
    if tensor.dim() == 1 or name.endswith("bias"):
        return "bias"
    return "matrix"
