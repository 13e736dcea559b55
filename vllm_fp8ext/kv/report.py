# SPDX-License-Identifier: Apache-2.0
"""How well scales fit K and V: by layer, and the worst of all."""

import math
from collections.abc import Sequence
from typing import Any

from vllm_fp8ext.kernels.reference import FP8_MAX
from vllm_fp8ext.kv.scales import Scales

Fits = dict[str, dict[str, dict[str, Any]]]
"""By layer, by `k` and `v`: the sums of `kernels.kv_cache.Fit`."""


def layer_reports(
    fits: Sequence[Fits], amax: Scales, scales: Scales
) -> dict[str, dict[str, dict[str, float]]]:
    """By layer, by `k` and `v`: `saturated_fraction`; `relative_error`, ‖x - dequantized‖ / ‖x‖; `headroom`, powers of two
    from the largest value that was seen to the largest code. `fits`: of each rank."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for layer in fits[0]:
        for kind in ("k", "v"):
            parts = [fit[layer][kind] for fit in fits]
            elements, saturated, error, norm = (
                sum(part[name] for part in parts)
                for name in ("elements", "saturated", "squared_error", "squared_norm")
            )
            found.setdefault(layer, {})[kind] = {
                "saturated_fraction": saturated / elements if elements else 0.0,
                "relative_error": math.sqrt(error / norm) if norm else 0.0,
                "headroom": _headroom(amax[layer][kind], scales[layer][kind]),
            }
    return found


def _headroom(amax: Sequence[float], scales: Sequence[float]) -> float:
    known = [(seen, scale) for seen, scale in zip(amax, scales, strict=True) if 0 < seen < math.inf]
    return min((math.log2(FP8_MAX * scale / seen) for seen, scale in known), default=0.0)


def worst(layers: dict[str, dict[str, dict[str, float]]], kind: str) -> dict[str, Any]:
    """Of K (`k`) or V (`v`): the largest fraction and error and the smallest headroom of any layer."""
    parts = {layer: report[kind] for layer, report in layers.items()}
    return {
        "saturated_fraction": max(part["saturated_fraction"] for part in parts.values()),
        "relative_error": max(part["relative_error"] for part in parts.values()),
        "headroom": min(part["headroom"] for part in parts.values()),
        "worst": max(parts, key=lambda layer: parts[layer]["saturated_fraction"]),
    }


def traffic_report(parts: Sequence[dict[str, dict[str, dict[str, int]]]]) -> dict[str, Any] | None:
    """Of K (`k`) and V (`v`) that were written into the cache: the largest saturated fraction of any layer, and which has it.
    None when nothing was written. `parts`: of each rank, by layer and kind, `elements` and how many were `saturated`."""
    found: dict[str, Any] = {}
    for kind in ("k", "v"):
        fractions = {}
        for layer in parts[0]:
            elements, saturated = (
                sum(part[layer][kind][name] for part in parts) for name in ("elements", "saturated")
            )
            if elements:
                fractions[layer] = saturated / elements
        if fractions:
            layer = max(fractions, key=lambda name: fractions[name])
            found[kind] = {"saturated_fraction": fractions[layer], "worst": layer}
    return found or None
