# SPDX-License-Identifier: Apache-2.0
"""Has steps of some hundred tokens, prompts among them, replay piecewise CUDA graphs too.

With small layers, steps of some thousand tokens do: to launch their kernels one by one takes the host longer than they
run. More sizes are seen here than vLLM's configuration has: the largest of that stays what attention, and graphs of
whole steps, go by.
"""

from typing import Any, Literal

import vllm.envs as envs
from vllm.config import CUDAGraphMode

from vllm_fp8ext.compat.speed.supported_engines import steps_together
from vllm_fp8ext.compat.wrapping import wrap
from vllm_fp8ext.config import GRAPH_TOKENS
from vllm_fp8ext.log import log_once

FEATURE: str = "piecewise_capture_sizes"
WHY: str = (
    "Replay CUDA graphs in steps of more tokens: vLLM's end at 512, and larger steps of "
    "small layers wait for the host."
)
GAIN: str = (
    "15 % more tokens/s with 8 requests of 512 tokens (Qwen3-1.7B, FP8 KV cache, H200), "
    "against graphs up to 2,048 tokens"
)
REPLACES: tuple[str, ...] = ("vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager._init_candidates",)
USES: dict[str, tuple[str, ...]] = {
    "replay CUDA graphs in steps of more tokens": (
        "vllm.v1.worker.gpu.cudagraph_utils:ModelCudaGraphManager",
        "vllm.config:CUDAGraphMode.mixed_mode",
        "vllm.engine.arg_utils:EngineArgs("
        "cudagraph_capture_sizes, max_cudagraph_capture_size, compilation_config, "
        "kv_cache_memory_bytes, num_gpu_blocks_override)",
    ),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM captures such sizes by default"
SWITCH: tuple[str, object] = ("kernels.graph_tokens", 0)
GPU_ONLY: bool = True

KEY = "fp8ext_graph_tokens"
"""In vLLM's additional configuration: up to which they reach in this engine."""
OPERATIONS = 1e12
"""Operations of a Hopper GPU in FP8 while a host launches one layer's kernels: a millisecond, 1.5 where cores are slow."""
ROUND = 1024
"""Tokens of which the default is a multiple."""


def configure(config: Any, arguments: Any, graph_tokens: int | Literal["auto"] | None) -> None:
    """Decide for a `VllmConfig` up to how many tokens: `graph_tokens`, else as many as are worth it, unless the
    `EngineArgs` that it was made of say which sizes are captured. Where they say how large the KV cache is, or vLLM is told
    not to measure what graphs take, it leaves no memory to more of them than usual.

    Cores of a mixture of experts replay graphs of the same size, that of the busiest one: theirs stay as large as vLLM's,
    behind which each core computes its own tokens alone."""
    if steps_together(config) and graph_tokens in (None, "auto"):
        graph_tokens = 0
    compilation = arguments.compilation_config
    sizes = (
        *(arguments.cudagraph_capture_sizes, arguments.max_cudagraph_capture_size),
        *(compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size),
    )
    if graph_tokens is None and any(size is not None for size in sizes):
        graph_tokens = 0
    elif graph_tokens is None:
        chosen_by_user = arguments.kv_cache_memory_bytes, arguments.num_gpu_blocks_override
        measured = chosen_by_user == (None, None) and envs.VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS
        graph_tokens = "auto" if measured else GRAPH_TOKENS
    tokens = worth_it(config) if graph_tokens == "auto" else graph_tokens
    config.additional_config = {**(config.additional_config or {}), KEY: tokens}


def worth_it(config: Any) -> int:
    """Count tokens whose products in a layer take less time than launching its kernels."""
    weights = layer_weights(config)
    tokens = int(OPERATIONS / (2 * weights)) if weights else 0
    return max(GRAPH_TOKENS, tokens - tokens % ROUND)


def layer_weights(config: Any) -> int | None:
    """Count the weights of one layer's matrices on one rank that multiply a token; None if the model's configuration
    tells them by other names than Llama's, Qwen's and their like.
    """
    model = config.model_config.hf_text_config
    try:
        hidden, heads = model.hidden_size, model.num_attention_heads
        size = getattr(model, "head_dim", None) or hidden // heads
        attention = 2 * (heads + model.num_key_value_heads) * size
        wide = model.intermediate_size
        if chosen := getattr(model, "num_experts_per_tok", None):
            # one that is as wide as they say, or some that are as wide as the others
            shared = getattr(model, "shared_expert_intermediate_size", None) or 0
            chosen += getattr(model, "n_shared_experts", None) or 0
            wide = chosen * model.moe_intermediate_size + shared
        return int(hidden * (attention + 3 * wide) // config.parallel_config.tensor_parallel_size)
    # not one number for all layers, or none
    except (AttributeError, TypeError, RuntimeError, ZeroDivisionError):
        return None


def install() -> None:
    """Have the engines that were configured for it capture more sizes. Idempotent."""
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager, ModelCudaGraphManager

    def wrapper(original: Any) -> Any:
        def with_more(self: Any) -> None:
            compilation = self.compilation_config
            sizes = compilation.cudagraph_capture_sizes
            more = _more(self) if sizes and isinstance(self, ModelCudaGraphManager) else []
            compilation.cudagraph_capture_sizes = [*sizes, *more] if more else sizes
            try:
                original(self)
            finally:
                compilation.cudagraph_capture_sizes = sizes

        return with_more

    wrap(CudaGraphManager, "_init_candidates", wrapper)


def _more(manager: Any) -> list[int]:
    # graphs of whole steps would grow too where requests may have several tokens
    if manager.cudagraph_mode.mixed_mode() != CUDAGraphMode.PIECEWISE or manager.varlen_decode:
        return []
    config = manager.vllm_config
    captured = manager.compilation_config.max_cudagraph_capture_size
    tokens = (config.additional_config or {}).get(KEY, 0)
    # a step that is captured has as many requests as there can be, none longer than there can be
    longest = manager.max_num_reqs * config.model_config.max_model_len
    more = sizes_beyond(captured, min(tokens, config.scheduler_config.max_num_batched_tokens, longest))
    if more:
        log_once(
            f"blockfp8: steps of {captured + 1} to {more[-1]} tokens replay CUDA graphs broken at attention"
        )
    return more


def sizes_beyond(captured: int, most: int) -> list[int]:
    """Sizes to capture beyond the largest that is captured: an eighth to a quarter larger each, so that little is computed
    in vain, but twice as large where that costs nothing, as memory and not arithmetic limits such steps."""
    sizes, size = [], captured
    while size < most:
        step = size if size <= 64 else 1 << (size.bit_length() - 3)
        size = min(size - size % step + step, most)
        sizes.append(size)
    return sizes
