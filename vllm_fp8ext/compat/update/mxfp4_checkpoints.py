# SPDX-License-Identifier: Apache-2.0
"""Reads MXFP4 checkpoints of gpt-oss as BF16 ones: experts are dequantized once, as they are loaded.

A trainer's updates are BF16 in transformers' layout, so the model is served from what they replace: `gate_up_proj` and
`down_proj` of all experts of a layer, `[experts, in, out]`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import ModelConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from vllm_fp8ext.compat.wrapping import wrapped
from vllm_fp8ext.errors import ConfigError
from vllm_fp8ext.kernels.numerics.mxfp4 import dequantize_mxfp4
from vllm_fp8ext.layers.quantization import MXFP4

FEATURE: str = "core"
WHY: str = (
    "Serve gpt-oss from its released weights: vLLM loads MXFP4 experts into its own MXFP4 kernels alone."
)
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = (
    "vllm.model_executor.model_loader.default_loader:DefaultModelLoader.get_all_weights(model_config, model)",
)
USES: dict[str, tuple[str, ...]] = {
    "read MXFP4 checkpoints as BF16 ones": ("vllm.config.model:ModelConfig.hf_config",),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM dequantizes MXFP4 checkpoints for other quantization methods"

BLOCKS, SCALES = "_blocks", "_scales"


@contextmanager
def dequantized_mxfp4(model: ModelConfig) -> Iterator[None]:
    """Dequantize what the default loader reads meanwhile, if the model's checkpoint is MXFP4.

    The model's configuration says from now on that it is not quantized, so that its own loader takes BF16.
    """
    quantization = getattr(model.hf_config, "quantization_config", None)
    if not quantization or quantization.get("quant_method") not in MXFP4:
        yield
        return
    del model.hf_config.quantization_config

    def wrap_get_all_weights(original: Any) -> Any:
        def get_all_weights(self: Any, of: Any, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
            return in_bf16(original(self, of, model))

        return get_all_weights

    with wrapped(DefaultModelLoader, "get_all_weights", wrap_get_all_weights):
        yield


def in_bf16(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield these tensors; of codes and their exponents, which come in any order, the values, `[experts, in, out]`.

    Raises:
        ConfigError: codes without exponents, or exponents without codes.
    """
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        suffix = next((end for end in (BLOCKS, SCALES) if name.endswith(end)), None)
        if suffix is None:
            yield name, tensor
            continue
        whole = name.removesuffix(suffix)
        parts = waiting.setdefault(whole, {})
        parts[suffix] = tensor
        if len(parts) == 2:
            del waiting[whole]
            experts = zip(parts[BLOCKS], parts[SCALES], strict=True)  # in fp32 all together take gigabytes
            yield whole, torch.stack([dequantize_mxfp4(*one).t().contiguous() for one in experts])
    if waiting:
        lacking = [
            f"{name}{end}" for name, parts in waiting.items() for end in {BLOCKS, SCALES} - parts.keys()
        ]
        raise ConfigError(f"MXFP4 checkpoint: expected {', '.join(sorted(lacking))}, found no such tensors")
