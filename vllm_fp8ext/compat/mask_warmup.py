# SPDX-License-Identifier: Apache-2.0
"""Compiles vLLM's kernels that mask logits by `top_p` and `top_k` before the server is ready: on CUDA vLLM's newer model
runner leaves them to the first request that needs them, which all others then wait for.

Replaces nothing; the kernels, and what they are compiled for, are those that vLLM registers for its other samplers. Can go
once it registers them for this one.
"""

from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry
from vllm.v1.sample.ops import topk_topp_sampler

from vllm_fp8ext.kernels.launch import ALIGNED, compiled_as


def warm_up_masks(config: VllmConfig) -> None:
    """Compile them by vLLM's threads; from the second start on they come from Triton's cache on disk."""
    registry = JitWarmupRegistry(config)
    with registry.activate():
        topk_topp_sampler.register_top_k_top_p_warmups()
    vocabulary = config.model_config.get_vocab_size()
    for kernel in registry._registrations:
        kernel.compile_many(
            key for key in kernel.get_warmup_keys(vllm_config=config) if _lies_so(key, vocabulary)
        )


def _lies_so(key: Any, vocabulary: int) -> bool:
    """Logits that are masked were copied: a row begins where the one before ends, and a lone row keeps the distance that it
    had among logits of a padded vocabulary."""
    stride = dict(key.inputs)["logits"].stride(0)
    return compiled_as(stride) in {compiled_as(vocabulary), compiled_as(ALIGNED)}
