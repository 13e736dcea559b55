# SPDX-License-Identifier: Apache-2.0
"""How well scales fit K and V: by layer, and the worst of all."""

import math
from collections.abc import Sequence
from typing import Any

from vllm_fp8ext.kernels.numerics.reference import FP8_MAX
from vllm_fp8ext.kv_types import Scales

Fits = dict[str, dict[str, dict[str, Any]]]
"""Sums of `kernels.attention.kv_cache.FitSums` by layer, then by `k` and `v`."""


def layer_reports(
    fits: Sequence[Fits], amax: Scales, scales: Scales
) -> dict[str, dict[str, dict[str, float]]]:
    """Report by layer, then by `k` and `v`: `saturated_fraction`; `relative_error`, ‖x - dequantized‖ / ‖x‖; `headroom`,
    powers of two from the largest value that was seen to the largest code. `fits`: of each rank."""
    reports: dict[str, dict[str, dict[str, float]]] = {}
    for layer in fits[0]:
        for kind in ("k", "v"):
            parts = [fit[layer][kind] for fit in fits]
            elements, saturated, error, norm = (
                sum(part[name] for part in parts)
                for name in ("elements", "saturated", "squared_error", "squared_norm")
            )
            reports.setdefault(layer, {})[kind] = {
                "saturated_fraction": saturated / elements if elements else 0.0,
                "relative_error": math.sqrt(error / norm) if norm else 0.0,
                "headroom": _headroom(amax[layer][kind], scales[layer][kind]),
            }
    return reports


def _headroom(amax: Sequence[float], scales: Sequence[float]) -> float:
    known = [(seen, scale) for seen, scale in zip(amax, scales, strict=True) if 0 < seen < math.inf]
    return min((math.log2(FP8_MAX * scale / seen) for seen, scale in known), default=0.0)


_WORST = {"saturated_fraction": max, "relative_error": max, "headroom": min}


def worst(layers: dict[str, dict[str, dict[str, float]]]) -> dict[str, dict[str, Any]] | None:
    """Report the worst of all layers for `k` and for `v`: the largest fraction and error, the smallest headroom, as far as
    they are known, and the layer with the largest fraction. None when nothing is."""
    if not layers:
        return None
    worst_fits: dict[str, dict[str, Any]] = {}
    for kind in ("k", "v"):
        parts = {layer: report[kind] for layer, report in layers.items()}
        names = next(iter(parts.values()))
        worst_fits[kind] = {name: _WORST[name](part[name] for part in parts.values()) for name in names}
        worst_fits[kind]["worst"] = max(parts, key=lambda layer: parts[layer]["saturated_fraction"])
    return worst_fits


def traffic_reports(
    parts: Sequence[dict[str, dict[str, dict[str, int]]]], amax: Scales, scales: Scales
) -> dict[str, dict[str, dict[str, float]]]:
    """Report what was written into the cache with these scales: `saturated_fraction` and `headroom` by layer, then by `k`
    and `v`. Layers into which nothing was written are left out. `parts`: of each rank, by layer and kind, `elements` and
    how many were `saturated`."""
    reports: dict[str, dict[str, dict[str, float]]] = {}
    for layer in parts[0]:
        for kind in ("k", "v"):
            elements, saturated = (
                sum(part[layer][kind][name] for part in parts) for name in ("elements", "saturated")
            )
            if elements:
                reports.setdefault(layer, {})[kind] = {
                    "saturated_fraction": saturated / elements,
                    "headroom": _headroom(amax[layer][kind], scales[layer][kind]),
                }
    return reports
