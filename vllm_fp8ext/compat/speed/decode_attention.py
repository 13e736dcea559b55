# SPDX-License-Identifier: Apache-2.0
"""Has requests with one new token attend by our own kernel; prompts stay with FlashAttention 3.

In steps that decode alone the kernel caches K and V too. `forward` and `do_kv_cache_update` are replaced on the instance.
"""

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
from vllm_fp8ext.compat.speed import decode_prefill_split
from vllm_fp8ext.compat.speed.layer_attention import LayerAttention, caches_codes, decodes_alone
from vllm_fp8ext.compat.wrapping import wrap_instance
from vllm_fp8ext.config import Settings
from vllm_fp8ext.kernels.attention.decode_attention import (
    HEAD_SIZES,
    MOST_GROUP,
    AttentionKind,
    DecodeAttention,
)
from vllm_fp8ext.kernels.numerics.reference import FP8_DTYPE, ScaleFormat
from vllm_fp8ext.kernels.runtime.cuda_kernel import CudaError
from vllm_fp8ext.log import log_once

FEATURE: str = "decode_attention"
WHY: str = (
    "Decode by our own attention kernel: FlashAttention 3 reads an FP8 cache at 33 to 66 % of memory speed."
)
GAIN: str = (
    "attention of a layer 0.41 ms a step instead of 0.73 with 8 requests, 2.92 instead of "
    "4.97 with 128 (Qwen3-1.7B, FP8 KV cache, H200)"
)
REPLACES: tuple[str, ...] = ("vllm.v1.attention.backends.flash_attn:FlashAttentionImpl.do_kv_cache_update",)
USES: dict[str, tuple[str, ...]] = {
    "decode by our own attention kernel": (
        "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl.batch_invariant_enabled",
    ),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "FlashAttention reads caches at memory speed whatever a step has of requests"
SWITCH: tuple[str, object] = ("kernels.takes_decode_attention", False)
GPU_ONLY: bool = True

Shape: TypeAlias = tuple[int, int, int, torch.device, torch.dtype]
"""Heads, KV heads, requests, device and dtype of the cache."""
Kernels: TypeAlias = dict[tuple[Shape, AttentionKind], DecodeAttention]
"""Kernels of one engine."""


def attach_all(model: nn.Module, config: Any) -> None:
    """Give the layers of a model, or of several, the kernel: those that it computes."""
    settings, fuses = Settings.parse(config.additional_config), is_available("quantized_attention")
    form = settings.scale_format if settings.kernels.quantized_attention and fuses else None
    kernels: Kernels = {}
    layers = [layer for layer in model.modules() if isinstance(layer, Attention)]
    every = settings.kernels.decode_attention == "all"
    quantizing = [attach(layer, config, kernels, form, every=every) for layer in layers]
    if fuses:
        from vllm_fp8ext.compat.graphs import fusion_attention

        for each in compiled_with(config, model):
            fusion_attention.configure(each, form if quantizing and all(quantizing) else None)


def attach(
    layer: Attention, config: Any, kernels: Kernels, form: ScaleFormat | None = None, *, every: bool = True
) -> bool:
    """Give a layer the kernel, if it computes such layers, and say so.

    Without `every` these are heads of 128 that attend to all before them, without soft caps and sinks.

    Layers of a shape, which run one after the other, share a kernel; those of another engine, whose memory may be given
    back, do not. It is compiled here: seconds, once on a machine. `form`: as of `replace_attention`. Tells whether the layer
    has a kernel that can quantize its outputs.
    """
    reason, kernel = unsupported_reason(layer, config), None
    if reason is None and not every and kind_of(layer) != AttentionKind():
        reason = f'{kind_of(layer)}, which kernels.decode_attention "all" takes'
    if reason is None:
        requests = max(
            config.scheduler_config.max_num_seqs, config.compilation_config.max_cudagraph_capture_size or 0
        )
        dtype = FP8_DTYPE if caches_codes(layer) else torch.bfloat16
        shape = (layer.num_heads, layer.num_kv_heads, requests, layer._k_scale.device, dtype)
        kind = kind_of(layer)
        try:
            kernel = kernels.get((shape, kind)) or DecodeAttention(*shape, kind=kind)
            kernels[shape, kind] = kernel
        except (CudaError, ValueError) as error:
            reason = str(error)
    if kernel is None:
        log_once(f"blockfp8: vLLM's attention decodes, for {reason}")
        return False
    log_once("blockfp8: requests that decode attend by our own kernel, prompts by FlashAttention 3")
    decode_prefill_split.install()
    replace_attention(layer, kernel, form if kernel.quantizes else None)
    return kernel.quantizes


def kind_of(layer: Attention) -> AttentionKind:
    """Return what the kernel has to know of a layer's attention."""
    before, _ = layer.impl.sliding_window
    return AttentionKind(
        head_size=layer.head_size,
        window=None if before < 0 else before + 1,
        soft_cap=float(layer.impl.logits_soft_cap or 0),
        sinks=layer.impl.sinks is not None,
    )


def unsupported_reason(layer: Attention, config: Any) -> str | None:
    """Say why a layer is not for the kernel; None if it is."""
    impl = layer.impl
    if layer.attn_backend.get_name() != "FLASH_ATTN":
        return f"attention by {layer.attn_backend.get_name()}"
    group, (before, behind) = impl.num_queries_per_kv, impl.sliding_window
    size, sinks = layer.head_size, impl.sinks
    reasons = {
        f"FlashAttention {impl.vllm_flash_attn_version}": impl.vllm_flash_attn_version != 3,
        f"heads of {size}": size not in HEAD_SIZES,
        f"heads of {size} with values of {layer.head_size_v}": layer.head_size_v != size,
        f"{group} query heads to a KV head": group > MOST_GROUP,
        f"a window of {behind} tokens behind one": behind != (-1 if before < 0 else 0),
        "attention over chunks": isinstance(layer, ChunkedLocalAttention),
        "ALiBi": impl.alibi_slopes is not None,
        "sinks in other dtypes than BF16": sinks is not None and sinks.dtype != torch.bfloat16,
        f"{impl.attn_type} attention": impl.attn_type != AttentionType.DECODER,
        "shared K and V": layer.kv_sharing_target_layer_name is not None,
        "queries in 16 bits": caches_codes(layer) and layer.query_quant is None,
        f"K and V in {layer.kv_cache_torch_dtype}": not caches_codes(layer)
        and layer.kv_cache_torch_dtype != torch.bfloat16,
        f"outputs in {layer.dtype}": layer.dtype != torch.bfloat16,
        "VLLM_BATCH_INVARIANT": impl.batch_invariant_enabled,
        "decode context parallelism": config.parallel_config.decode_context_parallel_size > 1,
        "microbatches": config.parallel_config.use_ubatching,
        "a KV connector": config.kv_transfer_config is not None,
    }
    return next((reason for reason, is_so in reasons.items() if is_so), None)


def replace_attention(layer: Attention, kernel: DecodeAttention, form: ScaleFormat | None = None) -> None:
    """Have a layer's implementation attend by the kernel where requests decode, and cache there too.

    With `form` outputs are quantized, with such scales, where a graph has room for that.
    """
    attention = LayerAttention(layer, kernel, form)
    wrap_instance(layer.impl, "forward", attention.wrap_forward)
    wrap_instance(layer.impl, "do_kv_cache_update", _wrap_do_kv_cache_update)
    decode_prefill_split.mark_decodes(layer.impl)


def _wrap_do_kv_cache_update(original: Any) -> Any:
    def do_kv_cache_update(module: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
        if not _is_cached_by_attention(module, slots):
            original(module, key, value, kv_cache, slots)

    return do_kv_cache_update


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
    return decodes_alone(metadata) and slots.data_ptr() == metadata.slot_mapping.data_ptr()
