# SPDX-License-Identifier: Apache-2.0
"""Compiles vLLM's kernels that mask logits by `top_p` and `top_k` before the server is ready.

On CUDA vLLM's newer model runner leaves them to the first request that needs them, which all others then wait for. The
kernels, and what they are compiled for, are those that vLLM registers for its other samplers.
"""

import logging
from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry
from vllm.v1.sample.ops import topk_topp_sampler

from vllm_fp8ext.kernels.runtime.launch import ALIGNED, compiled_as

FEATURE: str = "mask_warmup"
WHY: str = (
    "Compile what masks logits before the server is ready: vLLM's newer model runner leaves "
    "it to the first request."
)
GAIN: str = "no request waits for a compiler"
REPLACES: tuple[str, ...] = ()
USES: dict[str, tuple[str, ...]] = {
    "compile what masks logits before the server is ready": (
        "vllm.v1.sample.ops.topk_topp_sampler:register_top_k_top_p_warmups",
        "vllm.model_executor.warmup.jit_warmup:JitWarmupRegistry(vllm_config)",
        "vllm.model_executor.warmup.jit_warmup:JitWarmupRegistry.activate",
        "vllm.model_executor.warmup.jit_warmup:JitWarmupRegistry._registrations",
        "vllm.model_executor.warmup.jit_warmup:VllmJitKernel.get_warmup_keys",
        "vllm.model_executor.warmup.jit_warmup_triton_helper:TritonCompileKey(inputs)",
        "vllm.v1.worker.gpu_worker:Worker.use_v2_model_runner",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.is_last_pp_rank",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.is_pooling_model",
        "vllm.model_executor.warmup.jit_warmup:VllmJitKernel.compile_many(compile_keys)",
    ),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM registers them for its newer model runner"
GPU_ONLY: bool = True

logger = logging.getLogger("vllm.fp8ext")


def warm_up_masks(config: VllmConfig) -> None:
    """Compile them by vLLM's threads; from the second start on they come from Triton's cache on disk. What fails here is left
    to the request that needs it."""
    registry = JitWarmupRegistry(config)
    with registry.activate():
        topk_topp_sampler.register_top_k_top_p_warmups()
    vocabulary = config.model_config.get_vocab_size()
    try:
        for kernel in registry._registrations:
            kernel.compile_many(
                key for key in kernel.get_warmup_keys(vllm_config=config) if _lies_so(key, vocabulary)
            )
    except Exception as error:  # of Triton, its compiler or the driver
        logger.warning("blockfp8: masks for top_p and top_k are compiled when they are needed: %s", error)


def _lies_so(key: Any, vocabulary: int) -> bool:
    """Logits that are masked were copied: a row begins where the one before ends, and a lone row keeps the distance that it
    had among logits of a padded vocabulary."""
    stride = dict(key.inputs)["logits"].stride(0)
    return compiled_as(stride) in {compiled_as(vocabulary), compiled_as(ALIGNED)}
