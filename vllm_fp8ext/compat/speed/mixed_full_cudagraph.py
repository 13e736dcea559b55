# SPDX-License-Identifier: Apache-2.0
"""Has steps with short prompts replay one CUDA graph, attention within.

To launch attention layer by layer takes the host longer than such a step takes the GPU. Graphs of whole steps are for
requests that decode alone in vLLM. `gather_batch_req_state` comes before `dispatch` and sees how long contexts are;
`prepare_attn` does not tell whoever makes the metadata that a graph holds it.
"""

import bisect
from typing import Any

from vllm.config import CUDAGraphMode
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from vllm_fp8ext.compat.speed import decode_prefill_split, mixed_step_metadata, piecewise_capture_sizes
from vllm_fp8ext.compat.speed.supported_engines import is_plain
from vllm_fp8ext.compat.wrapping import wrap
from vllm_fp8ext.config import Settings
from vllm_fp8ext.log import log_once

FEATURE: str = "mixed_full_cudagraph"
WHY: str = (
    "Replay one CUDA graph in steps with short prompts: vLLM's are broken at attention, and "
    "wait for the host."
)
GAIN: str = (
    "first token of a prompt of 100 tokens after 9.4 ms instead of 20.1 (Qwen3-8B, FP8 KV cache, H200)"
)
REPLACES: tuple[str, ...] = (
    "vllm.v1.worker.gpu.cudagraph_utils:ModelCudaGraphManager.__init__("
    "vllm_config, cudagraph_mode, varlen_decode)",
    "vllm.v1.worker.gpu.cudagraph_utils:ModelCudaGraphManager.dispatch("
    "num_reqs, num_tokens, uniform_token_count, num_active_loras, max_query_len)",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.gather_batch_req_state(scheduler_output, dummy_run)",
    "vllm.v1.worker.gpu.model_states.default:DefaultModelState.prepare_attn("
    "input_batch, cudagraph_mode, block_tables, slot_mappings, attn_groups, kv_cache_config, "
    "for_capture)",
)
USES: dict[str, tuple[str, ...]] = {
    "replay one CUDA graph in steps with short prompts": (
        "vllm.v1.worker.gpu.cudagraph_utils:BatchExecutionDescriptor("
        "cg_mode, num_tokens, num_reqs, max_query_len)",
        "vllm.v1.worker.gpu.model_runner:BatchReqState(num_scheduled_tokens, idx_mapping_np, has_prefill)",
    ),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM has such graphs beside those that are broken at attention"
SWITCH: tuple[str, object] = ("kernels.mixed_full_cudagraph", False)
GPU_ONLY: bool = True
PLAIN_ENGINES: bool = True

REQUESTS = 256
"""Most of a step, by choice: attention looks at as many in each layer, be they there or not."""
SMALLEST = 16
"""Tokens of the smallest graph."""
_WHOLE, _IS_SHORT = "fp8ext_whole", "fp8ext_is_short"
"""Attributes of a `ModelCudaGraphManager`: descriptions of our graphs, the smallest first;
whether the next step that it is asked about is short enough for them.
"""


def install() -> None:
    """Have the engines that were configured for it capture and replay them. Idempotent."""
    from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    wrap(ModelCudaGraphManager, "__init__", _wrap_init)
    wrap(ModelCudaGraphManager, "dispatch", _wrap_dispatch)
    wrap(GPUModelRunner, "gather_batch_req_state", _wrap_gather_batch_req_state)
    wrap(DefaultModelState, "prepare_attn", _wrap_prepare_attn)


def _wrap_init(original: Any) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        add(self)

    return __init__


def add(manager: Any) -> None:
    """Add graphs to what a `ModelCudaGraphManager` captures, not to what it chooses from.

    The largest graph comes first, which makes room for the outputs of all; then vLLM's, of which it takes the first for
    what one more costs, when it looks for the memory that all will take.
    """
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

    requests = min(manager.max_num_reqs, REQUESTS)
    descriptions = [
        BatchExecutionDescriptor(CUDAGraphMode.FULL, size, min(size, requests), max_query_len=size)
        for size in _sizes(manager, requests)
    ]
    if not descriptions:
        return
    setattr(manager, _WHOLE, descriptions)
    whole = [*manager._capture_descs[CUDAGraphMode.FULL], *reversed(descriptions)]
    largest = max(whole, key=lambda one: one.num_tokens)
    whole.remove(largest)
    manager._capture_descs[CUDAGraphMode.FULL] = [largest, *whole]
    log_once(
        f"blockfp8: steps of up to {descriptions[-1].num_tokens} tokens of up to {requests} requests, prompts among them "
        f"with contexts of up to {decode_prefill_split.SHORT}, replay one CUDA graph, attention within"
    )


def _sizes(manager: Any, requests: int) -> list[int]:
    """List sizes as far as piecewise graphs reach, which take what does not fit."""
    config, pieces = manager.vllm_config, manager._capture_descs.get(CUDAGraphMode.PIECEWISE)
    if not pieces or CUDAGraphMode.FULL not in manager._capture_descs or not _is_configured(config):
        return []
    # no step has more: as many requests as there can be, none longer than attention takes
    longest = requests * min(decode_prefill_split.SHORT, config.model_config.max_model_len)
    most = min(pieces[0].num_tokens, longest)
    return [SMALLEST, *piecewise_capture_sizes.sizes_beyond(SMALLEST, most)] if most > SMALLEST else []


def _is_configured(config: Any) -> bool:
    """Tell whether an engine adds sizes to vLLM's and can hold whole steps.

    Its steps are told by tokens and contexts alone.
    """
    if not (config.additional_config or {}).get(piecewise_capture_sizes.KEY):
        return False
    settings = Settings.parse(config.additional_config)
    layers = config.compilation_config.static_forward_context.values()
    attention = [layer for layer in layers if isinstance(layer, AttentionLayerBase)]
    return bool(
        settings.kernels.mixed_full_cudagraph
        # which is seen between graphs' pieces
        and (settings.kv_scales is None or settings.kv_scales.policy != "history")
        and attention
        and all(decode_prefill_split.is_taken(layer) for layer in attention)
        and is_plain(config)
    )


def _wrap_dispatch(original: Any) -> Any:
    def dispatch(self: Any, num_reqs: int, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, _IS_SHORT, False) and self._graphs_captured:
            whole = getattr(self, _WHOLE)
            first = bisect.bisect_left(whole, num_tokens, key=lambda one: one.num_tokens)
            if first < len(whole) and num_reqs <= whole[first].num_reqs:
                return whole[first]
        return original(self, num_reqs, num_tokens, *args, **kwargs)

    return dispatch


def _wrap_gather_batch_req_state(original: Any) -> Any:
    def gather_batch_req_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        step, uniform = original(self, *args, **kwargs)
        manager = self.cudagraph_manager
        if hasattr(manager, _WHOLE):
            is_ours = step is not None and _is_short(step, self.req_states) and not _has_media(step, self)
            setattr(manager, _IS_SHORT, is_ours)
        return step, uniform

    return gather_batch_req_state


def _is_short(step: Any, states: Any) -> bool:
    """Tell whether requests that FlashAttention takes, behind those that decode, have short contexts."""
    new = step.num_scheduled_tokens
    if not step.has_prefill or not (longer := new > 1).any():
        return False
    first = int(longer.argmax())
    lengths = states.num_computed_tokens_np[step.idx_mapping_np[first:]] + new[first:]
    return bool(lengths.max() <= decode_prefill_split.SHORT)


def _has_media(step: Any, runner: Any) -> bool:
    """Tell whether a step has prompts with images, sounds or the like."""
    media = {} if runner.encoder_cache is None else runner.encoder_cache.mm_features
    prompts = step.is_prefilling_np.nonzero()[0]
    return any(media.get(step.req_ids[place]) for place in prompts)


def _wrap_prepare_attn(original: Any) -> Any:
    def prepare_attn(
        self: Any,
        input_batch: Any,
        cudagraph_mode: CUDAGraphMode,
        block_tables: Any,
        slot_mappings: Any,
        attn_groups: Any,
        kv_cache_config: Any,
        for_capture: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        inputs = (
            input_batch,
            cudagraph_mode,
            block_tables,
            slot_mappings,
            attn_groups,
            kv_cache_config,
            for_capture,
        )
        with mixed_step_metadata.making(is_one=for_capture or cudagraph_mode == CUDAGraphMode.FULL):
            return original(self, *inputs, *args, **kwargs)

    return prepare_attn
