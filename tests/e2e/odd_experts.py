# SPDX-License-Identifier: Apache-2.0
"""Tiny random checkpoints of models whose experts are fused in the checkpoint, stay in 16 bits, or have an odd router.

Nothing here imports vLLM.
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from vllm_fp8ext.kernels.numerics.mxfp4 import GROUP, dequantize_mxfp4

SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CHOSEN = {"num_experts_per_tok": 2, "head_dim": 64}
WINDOWS = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-oss": ("GptOssForCausalLM", {**CHOSEN, **WINDOWS, "num_local_experts": 4}),
    "GraniteMoE": ("GraniteMoeForCausalLM", {"num_experts_per_tok": 2, "num_local_experts": 4}),
    "ERNIE-4.5-MoE": (
        "Ernie4_5_MoeForCausalLM",
        {
            "moe_k": 2,
            "moe_num_experts": 4,
            "moe_intermediate_size": 192,  # as it is fused in transformers, no matrix is square
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 1,
        },
    ),
    "Qwen3-VL-MoE": (
        "Qwen3VLMoeForConditionalGeneration",
        {**CHOSEN, "num_experts": 4, "moe_intermediate_size": 192, "norm_topk_prob": True},
    ),
}
"""Transformers' class of each, and what its configuration has beside `SHAPE`."""
FAMILIES["gpt-oss on two ranks"] = FAMILIES["gpt-oss"]
LAYOUTS = {"gpt-oss": "in_out", "gpt-oss on two ranks": "in_out"}
"""How fused experts lie whose shape is the same both ways."""


def write(family: str, folder: Path, seed: int) -> dict[str, Tensor]:
    """Write a BF16 checkpoint, as it is released; returns the tensors of transformers' `state_dict`."""
    torch.manual_seed(seed)
    name, sizes = FAMILIES[family]
    kind = getattr(transformers, name)
    if family == "Qwen3-VL-MoE":
        rope = {"rope_type": "default", "mrope_section": [12, 10, 10], "rope_theta": 1e4}
        tower = {
            "depth": 1,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 256,
        }
        tower |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
        made = kind(
            kind.config_class(text_config={**SHAPE, **sizes, "rope_parameters": rope}, vision_config=tower)
        )
    else:
        made = kind(kind.config_class(**{**SHAPE, **sizes}))
    for parameter in made.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(3)
        else:
            parameter.data.add_(0.2 * torch.randn(parameter.shape))
    for _, bias in made.named_buffers():
        if bias.shape == (4,) or bias.shape == (1, 4):  # a router's correction bias
            bias.uniform_(0, 0.2)
    made = made.bfloat16()
    made.save_pretrained(folder)
    if family == "Qwen3-VL-MoE":
        _turn(folder / "model.safetensors")
    return {key: tensor.clone() for key, tensor in made.state_dict().items()}


def _turn(file: Path) -> None:
    """Write experts as they are released, `[experts, in, out]`; transformers 5 writes them the other way."""
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if ".experts." in name:
            tensors[name] = tensor.transpose(1, 2).contiguous()
    save_file(tensors, file, {"format": "pt"})


def write_mxfp4(folder: Path, out: Path) -> None:
    """Write a checkpoint of gpt-oss like the one in `folder` with random MXFP4 experts, and into `folder` their values."""
    tensors = load_file(folder / "model.safetensors")
    packed, noise = dict(tensors), torch.Generator().manual_seed(7)
    for name, tensor in tensors.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = tensor.shape
            shape = experts, rows, columns // GROUP
            blocks = torch.randint(0, 256, (*shape, GROUP // 2), dtype=torch.uint8, generator=noise)
            scales = torch.randint(119, 123, shape, dtype=torch.uint8, generator=noise)
            del packed[name]
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            tensors[name] = dequantize_mxfp4(blocks, scales).transpose(1, 2).contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    out.mkdir()
    save_file(packed, out / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (out / "config.json").write_text(json.dumps(config))
