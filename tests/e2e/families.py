# SPDX-License-Identifier: Apache-2.0
"""Tiny random checkpoints of families whose names, buffers or ties are special, made by transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

TEXT: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}
ENDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def gemma4() -> Any:
    """Text alone, tied, with a scalar in each layer that is a buffer."""
    more = {"num_global_key_value_heads": 2, "global_head_dim": 64, "vocab_size_per_layer_input": 128}
    more |= {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "sliding_window": 64}
    layers = ["sliding_attention", "full_attention"]
    return transformers.Gemma4ForCausalLM(
        transformers.Gemma4TextConfig(**TEXT, **ENDS, **more, layer_types=layers, tie_word_embeddings=True)
    )


def qwen2_5_vl() -> Any:
    text = {name: size for name, size in TEXT.items() if name != "head_dim"}
    rope = {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 10000.0}
    vision = {"depth": 1, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 256}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**text, **ENDS, "rope_scaling": rope, "tie_word_embeddings": False},
        vision_config={**vision, "fullatt_block_indexes": [0], "window_size": 28},
        **{
            f"{name}_token_id": number
            for number, name in enumerate(("image", "video", "vision_start", "vision_end"), 100)
        },
        tie_word_embeddings=False,
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def gemma3() -> Any:
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config={
            **TEXT,
            **ENDS,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        vision_config={**vision, "image_size": 56, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=100,
        boi_token_index=101,
        eoi_token_index=102,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def paligemma() -> Any:
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.PaliGemmaConfig(
        text_config={**TEXT, **ENDS, "model_type": "gemma", "num_key_value_heads": 1},
        vision_config={**vision, "model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14},
        image_token_index=100,
        projection_dim=256,
        hidden_size=256,
    )
    return transformers.PaliGemmaForConditionalGeneration(config)


def mixtral() -> Any:
    more = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    shape = {**TEXT, "intermediate_size": 384}  # which the shapes of stacked experts tell from the other
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**shape, **ENDS, **more, tie_word_embeddings=False)
    )


def qwen3() -> Any:
    """Untied: `tied` changes that."""
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**TEXT, **ENDS, tie_word_embeddings=False))


FAMILIES: dict[str, Callable[[], Any]] = {
    made.__name__: made for made in (gemma4, qwen2_5_vl, gemma3, paligemma, mixtral, qwen3)
}


def written(
    folder: Path, family: str, seed: int, change: Callable[[Any], None] = lambda model: None
) -> dict[str, Tensor]:
    """Write a checkpoint; returns the model's own `state_dict()`, whose names may be others than the checkpoint's."""
    torch.manual_seed(seed)
    model = FAMILIES[family]().to(torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.05)
    change(model)
    model.save_pretrained(folder)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def tied(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Give a checkpoint these tensors, and a configuration that ties its output layer to its embedding."""
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
