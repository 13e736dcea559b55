# SPDX-License-Identifier: Apache-2.0
"""Has vLLM compute logits in fp32, for the setting `lm_head` `fp32`.

vLLM does so where the model's configuration has a `head_dtype` (`--hf-overrides '{"head_dtype": "float32"}'`). The weight
keeps its dtype: on a GPU one product of 16-bit operands has results in fp32, on a CPU both are converted first.
"""

from typing import Any

import torch

from vllm_fp8ext.compat.features import reason_missing
from vllm_fp8ext.config import Settings
from vllm_fp8ext.errors import ConfigError

FEATURE: str = "fp32_head"
WHY: str = "Compute logits in fp32: vLLM has an override of the model's configuration for that."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = ()
USES: dict[str, tuple[str, ...]] = {
    "compute logits in fp32": (
        "vllm.config.model:ModelConfig.head_dtype",
        "vllm.model_executor.layers.logits_processor:LogitsProcessor.head_dtype",
    ),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM has an option of its own for it"

FP32 = ("float32", torch.float32)
"""Values of `head_dtype` that mean fp32."""


def configure(config: Any, settings: Settings) -> None:
    """Write `head_dtype` into the configuration of a model, if the settings ask for fp32.

    Raises:
        ConfigError: the model's configuration or another setting says otherwise, or this vLLM has no such thing.
    """
    model = config.model_config
    if settings.lm_head != "bf16" and model.runner_type == "pooling":
        raise ConfigError(
            f"lm_head {settings.lm_head} for a pooling model, which has no output layer: expected bf16"
        )
    configurations = [model.hf_config, model.hf_text_config]
    given = next(
        (of.head_dtype for of in configurations if getattr(of, "head_dtype", None) is not None), None
    )
    if settings.lm_head == "blockfp8" and given not in (None, "model", model.dtype):
        raise ConfigError(
            f"lm_head blockfp8: expected no head_dtype in the model's configuration or --hf-overrides, found {given}"
        )
    if settings.lm_head != "fp32":
        return
    if missing := reason_missing(FEATURE):
        raise ConfigError(f"lm_head fp32: the feature {FEATURE} is off, {missing}: expected lm_head bf16")
    if given is not None and given not in FP32:
        raise ConfigError(
            f"lm_head fp32: expected head_dtype float32 in --hf-overrides, or none, found {given}"
        )
    if settings.kernels.batch_invariant:
        raise ConfigError(
            "lm_head fp32 with kernels.batch_invariant: cuBLAS, which computes logits in fp32, takes other kernels with "
            "other batches: expected lm_head bf16"
        )
    for of in configurations:
        of.head_dtype = "float32"
