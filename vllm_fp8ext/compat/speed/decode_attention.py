# SPDX-License-Identifier: Apache-2.0
"""Has requests with one new token attend by our own kernel; prompts stay with FlashAttention 3.

In steps that decode alone the kernel caches K and V too. `forward` and `do_kv_cache_update` are replaced on the instance.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.attention import Attention, ChunkedLocalAttention
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.v1.attention.backend import AttentionType

from vllm_fp8ext.compat.features import is_available
from vllm_fp8ext.compat.graphs.compiled_configs import compiled_with
from vllm_fp8ext.compat.speed import decode_prefill_split, mixed_step_metadata
from vllm_fp8ext.compat.speed.capture import is_captured
from vllm_fp8ext.compat.wrapping import wrap_instance
from vllm_fp8ext.config import Settings
from vllm_fp8ext.kernels.attention.decode_attention import (
    HEAD_DIMENSION,
    MOST_GROUP,
    DecodeAttention,
    DecodeStep,
    lies_well,
)
from vllm_fp8ext.kernels.numerics.quantized import Quantized
from vllm_fp8ext.kernels.numerics.reference import FP8_DTYPE, ScaleFormat
from vllm_fp8ext.kernels.runtime.cuda_kernel import CudaError
from vllm_fp8ext.layers.kv_cache_method import FORMATS
from vllm_fp8ext.log import log_once

FEATURE: str = "decode_attention"
WHY: str = (
    "Decode by our own attention kernel: FlashAttention 3 reads an FP8 cache at 33 to 66 % of memory speed."
)
GAIN: str = (
    "attention of a layer 0.41 ms a step instead of 0.73 with 8 requests, 2.92 instead of "
    "4.97 with 128 (Qwen3-1.7B, FP8 KV cache, H200)"
)
REPLACES: tuple[str, ...] = (
    "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl.forward("
    "layer, query, key, value, kv_cache, attn_metadata, output)",
    "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl.do_kv_cache_update",
)
USES: dict[str, tuple[str, ...]] = {
    "decode by our own attention kernel": (
        "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl.batch_invariant_enabled",
    ),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "FlashAttention reads caches at memory speed whatever a step has of requests"
SWITCH: tuple[str, object] = ("kernels.takes_decode_attention", False)
GPU_ONLY: bool = True

Kernels: TypeAlias = dict[tuple[int, int, int, torch.device, torch.dtype], DecodeAttention]
"""Kernels of one engine, by heads, KV heads, requests, device and dtype of the cache."""


def attach_all(model: nn.Module, config: Any) -> None:
    """Give the layers of a model, or of several, the kernel: those that it computes."""
    settings, fuses = Settings.parse(config.additional_config), is_available("quantized_attention")
    form = settings.scale_format if settings.kernels.quantized_attention and fuses else None
    kernels: Kernels = {}
    layers = [layer for layer in model.modules() if isinstance(layer, Attention)]
    taken = [attach(layer, config, kernels, form) for layer in layers]
    if fuses:
        from vllm_fp8ext.compat.graphs import fusion_attention

        for each in compiled_with(config, model):
            fusion_attention.configure(each, form if taken and all(taken) else None)


def attach(layer: Attention, config: Any, kernels: Kernels, form: ScaleFormat | None = None) -> bool:
    """Give a layer the kernel, if the kernel computes such layers, and say so.

    Layers of a shape, which run one after the other, share a kernel; those of another engine, whose memory may be given
    back, do not. It is compiled here: seconds, once on a machine. `form`: as of `replace_attention`.
    """
    reason = unsupported_reason(layer, config)
    if reason is None:
        requests = max(
            config.scheduler_config.max_num_seqs, config.compilation_config.max_cudagraph_capture_size or 0
        )
        try:
            dtype = FP8_DTYPE if _caches_codes(layer) else torch.bfloat16
            shape = (layer.num_heads, layer.num_kv_heads, requests, layer._k_scale.device, dtype)
            kernel = kernels.get(shape) or kernels.setdefault(shape, DecodeAttention(*shape))
        except (CudaError, ValueError) as error:
            reason = str(error)
    if reason is not None:
        log_once(f"blockfp8: vLLM's attention decodes, for {reason}")
        return False
    log_once("blockfp8: requests that decode attend by our own kernel, prompts by FlashAttention 3")
    decode_prefill_split.install()
    replace_attention(layer, kernel, form)
    return True


def unsupported_reason(layer: Attention, config: Any) -> str | None:
    """Say why a layer is not for the kernel; None if it is."""
    impl = layer.impl
    if layer.attn_backend.get_name() != "FLASH_ATTN":
        return f"attention by {layer.attn_backend.get_name()}"
    group = impl.num_queries_per_kv
    reasons = {
        f"FlashAttention {impl.vllm_flash_attn_version}": impl.vllm_flash_attn_version != 3,
        f"heads of {layer.head_size}": (layer.head_size, layer.head_size_v) != (HEAD_DIMENSION,) * 2,
        f"{group} query heads to a KV head": group > MOST_GROUP,
        "a sliding window": tuple(impl.sliding_window) != (-1, -1),
        "attention over chunks": isinstance(layer, ChunkedLocalAttention),
        "soft-capped scores": bool(impl.logits_soft_cap),
        "ALiBi": impl.alibi_slopes is not None,
        "sinks": impl.sinks is not None,
        f"{impl.attn_type} attention": impl.attn_type != AttentionType.DECODER,
        "shared K and V": layer.kv_sharing_target_layer_name is not None,
        "queries in 16 bits": _caches_codes(layer) and layer.query_quant is None,
        f"K and V in {layer.kv_cache_torch_dtype}": not _caches_codes(layer)
        and layer.kv_cache_torch_dtype != torch.bfloat16,
        f"outputs in {layer.dtype}": layer.dtype != torch.bfloat16,
        "VLLM_BATCH_INVARIANT": impl.batch_invariant_enabled,
        "decode context parallelism": config.parallel_config.decode_context_parallel_size > 1,
        "microbatches": config.parallel_config.use_ubatching,
        "a KV connector": config.kv_transfer_config is not None,
    }
    return next((reason for reason, is_so in reasons.items() if is_so), None)


def _caches_codes(layer: Attention) -> bool:
    return layer.kv_cache_dtype in FORMATS


def replace_attention(layer: Attention, kernel: DecodeAttention, form: ScaleFormat | None = None) -> None:
    """Have a layer's implementation attend by the kernel where requests decode, and cache there too.

    With `form` outputs are quantized, with such scales, where a graph has room for that.
    """
    attention = LayerAttention(layer, kernel, form)
    wrap_instance(layer.impl, "forward", attention.wrap_forward)
    wrap_instance(layer.impl, "do_kv_cache_update", _wrap_do_kv_cache_update)
    decode_prefill_split.mark_decodes(layer.impl)


class LayerAttention:
    """Attention of one layer, by the kernel and by vLLM."""

    def __init__(self, layer: Attention, kernel: DecodeAttention, form: ScaleFormat | None) -> None:
        self.kernel = kernel
        self.scale = layer.impl.scale
        self.scale_format: ScaleFormat = form or "fp32"
        self.quantizes = form is not None
        # a checkpoint may have a scale for queries that are not quantized; that of K is one then
        self.query_scale = "_q_scale" if _caches_codes(layer) else "_k_scale"

    def wrap_forward(self, original: Any) -> Any:
        """Make a `forward` of vLLM's, which takes what the kernel does not."""

        def forward(
            module: Any,
            query: Tensor,
            key: Any,
            value: Any,
            kv_cache: Tensor,
            metadata: Any,
            output: Tensor,
            output_scale: Tensor | None = None,
            output_block_scale: Tensor | None = None,
        ) -> Any:
            room = None
            if self.quantizes and output_block_scale is not None:
                room = Quantized(output.flatten(1), output_block_scale)
            elif output_scale is not None or output_block_scale is not None:  # FlashAttention refuses it
                inputs = (module, query, key, value, kv_cache, metadata)
                return original(*inputs, output, output_scale, output_block_scale)
            step = _LayerStep(self, original, module, (query, key, value), kv_cache, metadata, output, room)
            return step.run()

        return forward


@dataclass(slots=True)
class _LayerStep:
    """One layer in one step."""

    layer: LayerAttention
    vllm_forward: Callable[..., Any]
    module: Any
    query_key_value: tuple[Tensor, Any, Any]
    """Q, K and V.

    The latter two are None where a layer is run again, whose K and V are cached by then.
    """
    kv_cache: Tensor
    metadata: Any
    output: Tensor
    room: Quantized | None
    """The place of quantized outputs, which is the same memory as `output`."""

    def run(self) -> Any:
        """Attend to all tokens of the step."""
        metadata = self.metadata
        _, key, value = self.query_key_value
        is_new = key is not None and value is not None
        whole = mixed_step_metadata.apart(metadata)
        if is_new and whole and _is_plain(metadata):
            self._attend_by_vllm(whole.prompts, 0, whole.lengths_R)
            return self.output
        if is_new and _decodes_alone(metadata):
            lengths, slots = metadata.seq_lens, metadata.slot_mapping
        elif is_new and _mixes(metadata):
            lengths, prompts = decode_prefill_split.apart(metadata)
            slots = None
            self._attend_by_vllm(prompts, lengths.shape[0])
        else:
            return self._attend_by_vllm(metadata, 0)
        count, layer = lengths.shape[0], self.layer
        if self.room is None:
            layer.kernel(self._first(lengths, slots), self.output[:count])
        else:
            layer.kernel(self._first(lengths, slots), _rows(self.room, slice(count)), layer.scale_format)
        return self.output

    def _first(self, lengths: Tensor, slots: Tensor | None) -> DecodeStep:
        """Describe the step's first requests, with one token each."""
        query, key, value = (_kernel_aligned(part[: lengths.shape[0]]) for part in self.query_key_value)
        module, layer = self.module, self.layer
        scales = (getattr(module, layer.query_scale), module._k_scale, module._v_scale)
        table = self.metadata.block_table
        return DecodeStep(query, key, value, self.kv_cache, table, lengths, slots, scales, layer.scale)

    def _attend_by_vllm(self, metadata: Any, first: int, lengths: Tensor | None = None) -> Any:
        """Attend from this token on.

        `lengths`: of a whole step, whose other requests the kernel attends to before, however many there are of each; it
        makes zeros of what is vLLM's.
        """
        output, room, layer = self.output, self.room, self.layer
        plain = output if room is None else torch.empty_like(output, dtype=torch.bfloat16)
        if lengths is not None:
            layer.kernel(self._first(lengths, None), plain[: lengths.shape[0]])
        attended = self.vllm_forward(self.module, *self.query_key_value, self.kv_cache, metadata, plain)
        if room is None:
            return attended
        target, rows = room, plain.flatten(1)
        # where scales are aligned; what is made too much of comes again, from the kernel
        if first := first // 4 * 4:
            target, rows = _rows(room, slice(first, None)), rows[first:]
        _quantizer()(target, rows, layer.scale_format)
        return output


def _wrap_do_kv_cache_update(original: Any) -> Any:
    def do_kv_cache_update(module: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
        if not _is_cached_by_attention(module, slots):
            original(module, key, value, kv_cache, slots)

    return do_kv_cache_update


@functools.cache
def _quantizer() -> Callable[[Quantized, Tensor, ScaleFormat], None]:
    """Needs Triton, which CPU builds lack."""
    from vllm_fp8ext.kernels.quantize.quantize_activation import quantize_into

    return quantize_into


def _kernel_aligned(part: Tensor) -> Tensor:
    return part if lies_well(part) else part.clone(memory_format=torch.contiguous_format)


def _rows(room: Quantized, which: slice) -> Quantized:
    return Quantized(room.codes[which], room.scales[which])


def _is_cached_by_attention(module: Any, slots: Tensor) -> bool:
    """Tell whether the kernel caches in this step what goes to these slots.

    vLLM also caches other tokens than those that the kernel attends to: before a draft model reads them, say.
    """
    if not is_forward_context_available():
        return False
    # a piece of a graph that is captured here may be replayed for steps that do not decode alone
    pieces = get_forward_context().cudagraph_runtime_mode is CUDAGraphMode.PIECEWISE
    if pieces:
        return False
    metadata = get_attention_context(module.layer_name)[0]
    return _decodes_alone(metadata) and slots.data_ptr() == metadata.slot_mapping.data_ptr()


def _decodes_alone(metadata: Any) -> bool:
    """Tell whether a plain causal step has one token of each request.

    It is the same when a CUDA graph is captured and when it is replayed: vLLM replays a graph of such steps for such steps
    alone.
    """
    return (
        _is_plain(metadata)
        and metadata.max_query_len == 1
        and metadata.seq_lens.shape[0] == metadata.num_actual_tokens
    )


def _mixes(metadata: Any) -> bool:
    """Tell whether a plain step begins with requests that have one token, before others.

    A graph that holds attention would be replayed for other numbers of them.
    """
    return _is_plain(metadata) and decode_prefill_split.mixes(metadata) and not is_captured()


def _is_plain(metadata: Any) -> bool:
    """Tell whether the step asks for causal attention and no more."""
    return bool(
        metadata is not None
        and metadata.causal is True
        and metadata.mm_prefix_query_range_tensor is None
        and metadata.rswa_prefix_lens is None
    )
