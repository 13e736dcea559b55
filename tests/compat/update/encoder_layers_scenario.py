# SPDX-License-Identifier: Apache-2.0
"""Makes a small PaliGemma, whose vision tower is vLLM's own SigLIP, with other settings each time. Takes two files: settings
by name, and one to which it writes which layers were made how."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import PaliGemmaConfig
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from vllm_fp8ext.compat.update import encoder_layers
from vllm_fp8ext.compat.update.model import kept_layers
from vllm_fp8ext.layers import unquantized_layers as kept

VISION = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {
    "model_type": "gemma",
    "hidden_size": 256,
    "intermediate_size": 344,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 128,
}


def layers(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """By the class of its method, the projections of the model; and what the log says of those that are kept."""
    config = EngineArgs(
        model=str(folder),
        quantization="blockfp8",
        skip_tokenizer_init=True,
        max_model_len=256,
        additional_config={"fp8ext": settings},
    ).create_engine_config()
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16), torch.device("meta"):
        model = initialize_model(vllm_config=config)
    collected: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, LinearBase):
            collected.setdefault(type(module.quant_method).__name__, []).append(name)
    return collected | {"log": kept.report(kept_layers(model))}


def main(asked: Path, out: Path) -> None:
    encoder_layers.install()
    vision = VISION | {
        "image_size": 56,
        "patch_size": 14,
        "projection_dim": 256,
        "model_type": "siglip_vision_model",
    }
    config = PaliGemmaConfig(
        vision_config=vision,
        text_config=TEXT,
        projection_dim=256,
        image_token_index=120,
        architectures=["PaliGemmaForConditionalGeneration"],
        dtype="bfloat16",
    )
    config.save_pretrained(out.parent)
    with set_current_vllm_config(
        EngineArgs(model=str(out.parent), skip_tokenizer_init=True).create_engine_config()
    ):
        init_distributed_environment(1, 0, f"file://{out.parent / 'store'}", 0, "gloo")
        initialize_model_parallel()
    result = {name: layers(out.parent, of) for name, of in json.loads(asked.read_text()).items()}
    kept.ENCODERS = frozenset()
    result["names that say nothing"] = layers(out.parent, {})
    out.write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
