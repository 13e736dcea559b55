# SPDX-License-Identifier: Apache-2.0
"""Observes queries, keys and values of some tokens, before they are rounded."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vllm_fp8ext.kernels.attention.kv_cache import amax_by_head, fit_all
from vllm_fp8ext.kv_types import NAMES, RankScales
from vllm_fp8ext.update.worker.kv_buffers import KvScaleBuffers

SAMPLE_TOKENS = 128
"""Tokens of each layer's K and V, evenly chosen, that tell how well scales fit."""


class KvObserver:
    """Sees one pass (`see`), then tells `amax`, and how well scales fit."""

    def __init__(self, *, per_head: bool) -> None:
        self._per_head = per_head
        self._amax: dict[tuple[str, str], Tensor] = {}
        self._sample: dict[tuple[str, str], Tensor] = {}

    def see(self, layer: str, query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor) -> None:
        """Take the largest magnitudes of a layer; keep a sample of its K and V."""
        heads = key_TGD.shape[1] if self._per_head else 1
        for kind, values in zip(NAMES, (query_THD, key_TGD, value_TGD), strict=True):
            self._amax[layer, kind] = amax_by_head(values, heads)
            if kind != "q":
                self._sample[layer, kind] = values[:: -(-len(values) // SAMPLE_TOKENS)].clone()

    def amax(self, spread: Callable[[str, list[float]], list[float | None]]) -> RankScales:
        """Return the largest magnitudes, each layer's `spread` over the heads of all ranks."""
        if not self._amax:
            return {}
        values = iter(torch.cat(list(self._amax.values())).tolist())
        by_layer: RankScales = {}
        for (layer, kind), amax in self._amax.items():
            by_layer.setdefault(layer, {})[kind] = spread(layer, [next(values) for _ in range(len(amax))])
        return by_layer

    def fits(self, scales: KvScaleBuffers) -> dict[str, dict[str, dict[str, Any]]]:
        """Measure how well the shadow's scales fit the sample.

        Returns, by layer, by `k` and `v`, the sums of `FitSums`.
        """
        by_layer: dict[str, dict[str, dict[str, Any]]] = {}
        fits = fit_all([(values, scales.staged(*key)) for key, values in self._sample.items()])
        for (layer, kind), fit in zip(self._sample, fits, strict=True):
            by_layer.setdefault(layer, {})[kind] = vars(fit)
        return by_layer
