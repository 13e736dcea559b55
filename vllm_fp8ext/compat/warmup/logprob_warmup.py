# SPDX-License-Identifier: Apache-2.0
"""Compiles vLLM's kernel for log-probabilities before the server is ready.

It does so for as many tokens as a request may ask for. A trainer asks for those of the sampled tokens, for which vLLM's
warm-up compiles nothing. While that runs, `compute_token_logprobs` is replaced.
"""

from typing import Any

from torch import Tensor

from vllm_fp8ext.compat.wrapping import wrap
from vllm_fp8ext.kernels.runtime.launch import compiled_as

FEATURE: str = "logprob_warmup"
WHY: str = (
    "Compile the kernel for log-probabilities before the server is ready: vLLM's warm-up "
    "asks for 5 a token alone."
)
GAIN: str = "no request waits for a compiler"
REPLACES: tuple[str, ...] = (
    "vllm.v1.worker.gpu_worker:warmup_kernels(model_runner, worker_execute_model, worker_sample_tokens)",
    "vllm.v1.worker.gpu.sample.logprob:compute_token_logprobs(logits, token_ids)",
)
USES: dict[str, tuple[str, ...]] = {}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM warms up requests with other `logprobs` than 5"
GPU_ONLY: bool = True

WIDEST = 1024
"""Columns from which on the kernel takes them part by part."""


def install() -> None:
    """Have every warm-up of vLLM's compile all of them. Idempotent."""
    from vllm.v1.worker import gpu_worker
    from vllm.v1.worker.gpu.sample import logprob

    def wrapper(original: Any) -> Any:
        def warm_up(runner: Any, *args: Any, **kwargs: Any) -> None:
            compute, of = logprob.compute_token_logprobs, runner.model_config
            most = of.max_logprobs if of.max_logprobs >= 0 else of.get_vocab_size()

            def for_all(logits_TV: Tensor, tokens_TC: Tensor) -> Tensor:
                for dtype in {logits_TV.dtype, of.dtype}:  # processed or not
                    for count in columns(1 + most):
                        compute(logits_TV[:1].to(dtype), tokens_TC[:1, :1].repeat(1, count))
                result: Tensor = compute(logits_TV, tokens_TC)
                return result

            logprob.compute_token_logprobs = for_all
            try:
                original(runner, *args, **kwargs)
            finally:
                logprob.compute_token_logprobs = compute

        return warm_up

    wrap(gpu_worker, "warmup_kernels", wrapper)


def columns(most: int) -> list[int]:
    """One number of columns from 1 to `most` for each variant of the kernel: its block, the next power of two, and what
    Triton compiles apart, which is 1, multiples of 16, and all others."""
    variants: dict[tuple[int, str], int] = {}
    for count in range(1, min(most, WIDEST) + 1):
        variants.setdefault((1 << (count - 1).bit_length(), compiled_as(count)), count)
    return list(variants.values())
