# SPDX-License-Identifier: Apache-2.0
"""Records how large K, V and Q of real traffic are ("delayed scaling").

`forward` of an attention layer's implementation comes right after the layer's cache was written, with the same K and V, and
sees the query as the kernel does.

Python runs there in every step without CUDA graphs, and in piecewise ones, which are broken at attention. In steps that are
replayed as one whole graph it does not (decoding alone, with vLLM's default `FULL_AND_PIECEWISE`): those steps are not
recorded. Prefill, and decoding beside it, are.
"""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention import Attention

from vllm_fp8ext.compat.speed.capture import is_captured
from vllm_fp8ext.compat.wrapping import wrap_instance
from vllm_fp8ext.kernels.attention.kv_amax import AmaxCounts, AmaxTally
from vllm_fp8ext.kernels.numerics.reference import FP8_DTYPE

FEATURE: str = "core"
WHY: str = "Record the amaxes of real traffic for kv_scales history: vLLM records none."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = (
    "vllm.v1.attention.backend:AttentionImpl.forward("
    "layer, query, key, value, kv_cache, attn_metadata, output)",
)
USES: dict[str, tuple[str, ...]] = {}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM records amaxes of an FP8 KV cache"


class KvRecorder:
    """Records one step in `every` of all `layers`, in the order they run.

    On a GPU nothing is waited for but in `take`, and a recorded step costs one launch a layer. Not seen: padding, profiling
    and warm-up (their slots are padding), what is captured into a CUDA graph.
    """

    def __init__(self, layers: Mapping[str, Attention], every: int) -> None:
        self._layers = dict(layers)
        self._every = every
        self._steps = 0
        self._recording = False
        self._tallies: dict[str, AmaxTally] = {}
        for index, (name, layer) in enumerate(self._layers.items()):
            self._tallies[name] = AmaxTally(layer.num_kv_heads, layer._k_scale.device)
            _warm_up(layer, self._tallies[name])
            wrapper = functools.partial(self._wrap_forward, layer, self._tallies[name], not index)
            wrap_instance(layer.impl, "forward", functools.update_wrapper(wrapper, self._wrap_forward))

    def take(self) -> dict[str, AmaxCounts]:
        """Return what each layer has seen since the last time; waits for the GPU. Scales may change after this, not
        before: what is read off a quantized query is in units of its scale at that time.
        """
        return {name: tally.take() for name, tally in self._tallies.items()}

    def _wrap_forward(self, layer: Attention, tally: AmaxTally, first: bool, original: Any) -> Any:
        def forward(
            module: Any,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            kv_cache: Tensor,
            metadata: Any,
            *args: Any,
            **named: Any,
        ) -> Any:
            if first:
                self._recording = self._steps % self._every == 0
                self._steps += 1
            if self._recording and metadata is not None and not is_captured():
                _add(tally, layer, query, key, value, metadata.slot_mapping)
            return original(module, query, key, value, kv_cache, metadata, *args, **named)

        return forward


def _add(
    tally: AmaxTally, layer: Attention, query: Tensor, key: Tensor, value: Tensor, slots: Tensor
) -> None:
    grouped = query.view(len(query), layer.num_kv_heads, -1)
    tally.add((key, value, grouped), slots, (layer._k_scale, layer._v_scale, layer._q_scale))


def _warm_up(layer: Attention, tally: AmaxTally) -> None:
    """Have the kernel compiled before the first request: a token of padding, laid out as a fused projection does it."""
    where, dtype = layer._k_scale.device, layer.dtype
    widths = [
        layer.num_heads * layer.head_size,
        layer.num_kv_heads * layer.head_size,
        layer.num_kv_heads * layer.head_size_v,
    ]
    query, key, value = torch.zeros(1, sum(widths), dtype=dtype, device=where).split(widths, 1)
    if layer.query_quant is not None:
        query = torch.zeros_like(query).to(FP8_DTYPE)
    slots = torch.full((1,), -1, dtype=torch.int64, device=where)
    key, value = (part.view(1, layer.num_kv_heads, -1) for part in (key, value))
    _add(tally, layer, query.view(1, layer.num_heads, -1), key, value, slots)
