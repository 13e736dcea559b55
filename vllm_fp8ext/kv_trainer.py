# SPDX-License-Identifier: Apache-2.0
"""KV-cache scales that a trainer computes with its own model, for the policy `provided`. Needs torch alone."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from vllm_fp8ext.kernels.attention.kv_cache import MARGIN, amax_by_head, next_scales
from vllm_fp8ext.kernels.numerics.reference import ScaleFormat
from vllm_fp8ext.kv_types import Scales

CachedKV = list[tuple[Tensor, Tensor]]
"""K after rotary embedding and V, by layer: `[tokens, KV heads, head dimension]` each."""


@torch.no_grad()
def cached_kv(model: Any, prompts: Sequence[Sequence[int]]) -> CachedKV:
    """Return what a causal model of Hugging Face caches for these token ids. Prompts run one at a time."""
    by_prompt: list[list[tuple[Tensor, Tensor]]] = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)], device=model.device)
        cache = model(ids, use_cache=True).past_key_values
        by_prompt.append([(_by_token(layer.keys), _by_token(layer.values)) for layer in cache.layers])
    return [
        (torch.cat([key for key, _ in parts]), torch.cat([value for _, value in parts]))
        for parts in zip(*by_prompt, strict=True)
    ]


def _by_token(cached_1GTD: Tensor) -> Tensor:
    return cached_1GTD[0].transpose(0, 1)


def scales_of(
    cached: CachedKV,
    layers: Sequence[str],
    *,
    granularity: Literal["layer", "head"] = "layer",
    margin: float = MARGIN,
    scale_format: ScaleFormat = "pow2",
) -> Scales:
    """Compute the scales that the server would calibrate from the same K and V. Send them as `KvScales(policy="provided",
    scales=…)`.

    `layers`: what the server calls them, in the order of the model: `list(client.kv_scales().scales)`. Where K or V of a
    layer are all zero or not finite, 1.0.
    """
    by_layer: Scales = {}
    for layer, parts in zip(layers, cached, strict=True):
        by_layer[layer] = {}
        for kind, values in zip(("k", "v"), parts, strict=True):
            amax = amax_by_head(values, values.shape[1] if granularity == "head" else 1)
            scales = next_scales(amax, torch.ones_like(amax), margin=margin, scale_format=scale_format)
            by_layer[layer][kind] = scales.tolist()
    return by_layer
