# SPDX-License-Identifier: Apache-2.0
"""Attention of one layer in one step: our kernel for requests with one new token, vLLM for the rest."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention import Attention

from vllm_fp8ext.compat.speed import decode_prefill_split, mixed_step_metadata
from vllm_fp8ext.compat.speed.capture import is_captured
from vllm_fp8ext.kernels.attention.decode_attention import DecodeAttention, DecodeStep, is_kernel_aligned
from vllm_fp8ext.kernels.numerics.quantized import Quantized
from vllm_fp8ext.kernels.numerics.reference import ScaleFormat
from vllm_fp8ext.layers.kv_cache_method import FORMATS

FEATURE: str = "decode_attention"
WHY: str = (
    "Decode by our own attention kernel: FlashAttention 3 reads an FP8 cache at 33 to 66 % of memory speed."
)
GAIN: str = "see decode_attention"
REPLACES: tuple[str, ...] = (
    "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl.forward("
    "layer, query, key, value, kv_cache, attn_metadata, output)",
)
USES: dict[str, tuple[str, ...]] = {}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "decode_attention can go"
GPU_ONLY: bool = True


def caches_codes(layer: Attention) -> bool:
    return layer.kv_cache_dtype in FORMATS


class LayerAttention:
    """Attention of one layer, by the kernel and by vLLM."""

    def __init__(self, layer: Attention, kernel: DecodeAttention, form: ScaleFormat | None) -> None:
        self.kernel = kernel
        self.impl = layer.impl
        self.scale_format: ScaleFormat = form or "fp32"
        self.quantizes = form is not None
        # a checkpoint may have a scale for queries that are not quantized; that of K is one then
        self.query_scale = "_q_scale" if caches_codes(layer) else "_k_scale"

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
        if is_new and decodes_alone(metadata):
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
        scale, sinks = layer.impl.scale, layer.impl.sinks
        return DecodeStep(query, key, value, self.kv_cache, table, lengths, slots, scales, scale, sinks)

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


@functools.cache
def _quantizer() -> Callable[[Quantized, Tensor, ScaleFormat], None]:
    """Needs Triton, which CPU builds lack."""
    from vllm_fp8ext.kernels.quantize.quantize_activation import quantize_into

    return quantize_into


def _kernel_aligned(part: Tensor) -> Tensor:
    return part if is_kernel_aligned(part) else part.clone(memory_format=torch.contiguous_format)


def _rows(room: Quantized, which: slice) -> Quantized:
    return Quantized(room.codes[which], room.scales[which])


def decodes_alone(metadata: Any) -> bool:
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
