# SPDX-License-Identifier: Apache-2.0
"""Has steps of some hundred tokens, prompts among them, replay CUDA graphs too, broken at attention: to launch their kernels
one by one takes the host longer than they run. With small layers that is so at any size: then steps that are full do too,
as most are while prompts wait.

Replaces `CudaGraphManager._init_candidates`, which sees more sizes than vLLM's configuration has: the largest of that stays
what attention, and graphs of whole steps, go by. Can go once vLLM captures such sizes by default.
"""

from typing import Any

from vllm.config import CUDAGraphMode

from vllm_fp8ext.compat.log import log_once
from vllm_fp8ext.compat.wrapping import wrap
from vllm_fp8ext.config import GRAPH_TOKENS

KEY = "fp8ext_graph_tokens"
"""In vLLM's additional configuration: up to which they reach in this engine."""
HOST_OPERATIONS = 2e12
"""Of a layer's products, 2 ms of a Hopper GPU: with fewer it is done before a slow host has launched the next layer."""
FULL = 64
"""A step is full if no more than one of so many of its tokens would be padding."""


def configure(config: Any, arguments: Any, asked: int | None) -> None:
    """Decide for a `VllmConfig` up to how many tokens: what was `asked`, else `GRAPH_TOKENS`, unless the `EngineArgs` that it
    was made of say which sizes are captured."""
    compilation = arguments.compilation_config
    sizes = (
        *(arguments.cudagraph_capture_sizes, arguments.max_cudagraph_capture_size),
        *(compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size),
    )
    if asked is None:
        asked = GRAPH_TOKENS if all(size is None for size in sizes) else 0
    config.additional_config = {**(config.additional_config or {}), KEY: asked}


def install() -> None:
    """Have the engines that were configured for it capture more sizes. Idempotent."""
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager, ModelCudaGraphManager

    def wrapper(original: Any) -> Any:
        def with_more(self: Any) -> None:
            compilation = self.compilation_config
            sizes = compilation.cudagraph_capture_sizes
            more = _more(self) if sizes and isinstance(self, ModelCudaGraphManager) else []
            whole = _whole(self, more[-1]) if more else None
            beyond = [*more, whole] if whole else more
            compilation.cudagraph_capture_sizes = [*sizes, *beyond] if more else sizes
            try:
                original(self)
            finally:
                compilation.cudagraph_capture_sizes = sizes
            if whole:
                for tokens in range(more[-1] + 1, whole - whole // FULL):
                    for adapters in self.lora_capture_cases:
                        del self._candidates[tokens, adapters]

        return with_more

    wrap(CudaGraphManager, "_init_candidates", wrapper)


def _more(manager: Any) -> list[int]:
    # graphs of whole steps would grow too where requests may have several tokens
    if manager.cudagraph_mode.mixed_mode() != CUDAGraphMode.PIECEWISE or manager.varlen_decode:
        return []
    captured = manager.compilation_config.max_cudagraph_capture_size
    wanted = (manager.vllm_config.additional_config or {}).get(KEY, 0)
    more = sizes_beyond(captured, min(wanted, _most(manager)))
    if more:
        log_once(
            f"blockfp8: steps of {captured + 1} to {more[-1]} tokens replay CUDA graphs broken at attention"
        )
    return more


def _most(manager: Any) -> int:
    """Tokens of a step. One that is captured has as many requests as there can be, none longer than there can be."""
    config = manager.vllm_config
    longest = manager.max_num_reqs * config.model_config.max_model_len
    return int(min(config.scheduler_config.max_num_batched_tokens, longest))


def _whole(manager: Any, captured: int) -> int | None:
    """The size of full steps, where those wait for the host and no smaller graph holds them."""
    tokens = _most(manager)
    weights = layer_weights(manager.vllm_config)
    if tokens <= captured or weights is None or 2 * weights * tokens >= HOST_OPERATIONS:
        return None
    log_once(f"blockfp8: so do those of {tokens}")
    return tokens


def layer_weights(config: Any) -> int | None:
    """Of one layer's matrices on one rank, those that multiply a token; None if the model's configuration tells them by other
    names than Llama's, Qwen's and their like."""
    model = config.model_config.hf_text_config
    try:
        hidden, heads = model.hidden_size, model.num_attention_heads
        size = getattr(model, "head_dim", None) or hidden // heads
        attention = 2 * (heads + model.num_key_value_heads) * size
        if chosen := getattr(model, "num_experts_per_tok", None):
            shared = getattr(model, "shared_expert_intermediate_size", None) or 0
            wide = chosen * model.moe_intermediate_size + shared
        else:
            wide = model.intermediate_size
        return int(hidden * (attention + 3 * wide) // config.parallel_config.tensor_parallel_size)
    except (AttributeError, TypeError):
        return None


def sizes_beyond(captured: int, most: int) -> list[int]:
    """Sizes to capture beyond the largest that is captured: an eighth to a quarter larger each, so that little is computed
    in vain, but twice as large where that costs nothing, as memory and not arithmetic limits such steps."""
    sizes, size = [], captured
    while size < most:
        step = size if size <= 64 else 1 << (size.bit_length() - 3)
        size = min(size - size % step + step, most)
        sizes.append(size)
    return sizes
