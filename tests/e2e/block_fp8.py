# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in DeepSeek's format: codes, and block scales beside them."""

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from vllm_fp8ext.kernels.numerics import reference


def write_block_fp8(checkpoint: Path, folder: Path) -> None:
    """Quantize the projections of a checkpoint; its configuration says so."""
    tensors = {}
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            tensors[name], tensors[f"{name}_scale_inv"] = reference.quantize_weight(tensor)
        else:
            tensors[name] = tensor
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    (folder / "config.json").write_text(json.dumps(config))
