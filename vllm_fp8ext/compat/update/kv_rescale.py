# SPDX-License-Identifier: Apache-2.0
"""Rewrites what an engine has cached of K and V when scales change."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vllm_fp8ext.compat.update.kv_cache import HeldBlocks, key_value_views, latent_views
from vllm_fp8ext.kernels.attention.rescale_kv import CachedLayer, RescaleCounts, rescale_kv, warm_up
from vllm_fp8ext.layers.kv_cache_method import LATENT_BACKENDS

FEATURE: str = "core"
WHY: str = "Keep cached K and V right when their scales change: vLLM's scales never do."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = ()
USES: dict[str, tuple[str, ...]] = {}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM's FP8 KV cache takes new scales at run time"


class CachedCodes:
    """The KV cache of one rank. `layers`: its attention layers by name, those that write K and V."""

    def __init__(self, layers: Mapping[str, Any]) -> None:
        self._layers = layers

    def warm_up(self) -> None:
        """Compile what `rescale` launches, once the cache is there."""
        one = {"k": [1.0], "v": [1.0]}
        warm_up([self._cached(name, one) for name in self._layers])

    def rescale(
        self, ratios: Mapping[str, Mapping[str, list[float]]], held: Sequence[dict[str, Any]]
    ) -> dict[str, int]:
        """Multiply the codes of these layers by their ratios in blocks that are `held`.

        Those are fields of `HeldBlocks`, one for each group of layers. Counts over the codes: `codes`, `saturated`,
        `flushed` to zero.
        """
        total = RescaleCounts()
        for group in (HeldBlocks(**fields) for fields in held):
            layers = [
                self._cached(name, ratios[name])
                for name in group.layers
                if name in ratios and name in self._layers
            ]
            if layers:
                total += rescale_kv(layers, group.rows(layers[0].k))
        return vars(total)

    def _cached(self, name: str, ratios: Mapping[str, list[float]]) -> CachedLayer:
        layer = self._layers[name]
        if layer.attn_backend.get_name() in LATENT_BACKENDS:
            first, second = latent_views(layer)
            ratio = torch.tensor(ratios["k"]).expand(first.shape[2])
            return CachedLayer(first, second, ratio, ratio)
        key, value = key_value_views(layer)
        by_head = (torch.tensor(ratios[kind]).expand(layer.num_kv_heads) for kind in ("k", "v"))
        return CachedLayer(key, value, *by_head)
