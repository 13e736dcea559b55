# SPDX-License-Identifier: Apache-2.0
"""FP8 scales of queries, keys and values in plain torch: the one definition for server and trainer.

A scale belongs to a layer, or to each KV head of a layer; queries share the scale of the KV head that they attend to. Codes
are E4M3, `value / scale` rounded to nearest even and clamped to ±448. Needs nothing but torch.

Shape suffixes: T tokens, H heads of queries, G heads of keys and values, D head dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_fp8ext.kernels.numerics.reference import FP8_DTYPE, FP8_MAX, ScaleFormat, scale_of

_TOGETHER_ELEMENTS = 1 << 21
"""Most elements whose fit is computed together: bounds temporaries to 64 MiB, unless one tensor has more."""
MARGIN = 1.0
"""Powers of two between the largest value seen and the largest that E4M3 holds."""


def amax_by_head(values_THD: Tensor, heads: int) -> Tensor:
    """Largest magnitude of each of `heads` groups of neighbouring heads: fp32 `[heads]`; NaN where there is one."""
    tokens, count, width = values_THD.shape
    grouped = values_THD.abs().reshape(tokens, heads, count // heads * width)
    return grouped.amax((0, 2)).float() if tokens else torch.zeros(heads, device=values_THD.device)


def next_scales(
    amax: Tensor, served: Tensor, *, margin: float = MARGIN, scale_format: ScaleFormat = "pow2"
) -> Tensor:
    """fp32 scales for values up to `amax`: `amax * 2**margin / 448`, or the smallest power of two that is not below it.

    Where an amax is zero, infinite or NaN nothing is known, and the scale that is `served` stays. With `margin`, as in
    Transformer Engine's delayed scaling (`transformer_engine.common.recipe.DelayedScaling`), powers of two are left for
    values that were not seen. Above the smallest normal number nothing is lost by that, and a step from one power of two to
    another is exact.
    """
    known = torch.isfinite(amax) & (amax > 0)
    scales = scale_of(torch.where(known, amax, 1.0).float() * 2.0**margin, scale_format)
    return torch.where(known & torch.isfinite(scales), scales, served.to(amax.device))


def quantize(values_TGD: Tensor, scales_G: Tensor) -> Tensor:
    """E4M3 codes `[T, G, D]`; `scales_G` has one scale, or one a head."""
    return (values_TGD.float() / _by_head(scales_G)).clamp(-FP8_MAX, FP8_MAX).to(FP8_DTYPE)


def dequantize(codes_TGD: Tensor, scales_G: Tensor) -> Tensor:
    """fp32 values `[T, G, D]` that codes stand for."""
    return codes_TGD.float() * _by_head(scales_G)


def _by_head(scales_G: Tensor) -> Tensor:
    return scales_G[..., None].float()


@dataclass(frozen=True)
class FitSums:
    """How well scales fit values: sums, so that ranks and layers can be added."""

    elements: int
    saturated: int
    """Elements beyond the largest code; infinity and NaN are too, and in neither of the sums that follow."""
    squared_error: float
    squared_norm: float


def fit(values_TGD: Tensor, scales_G: Tensor) -> FitSums:
    """Measure what quantizing these values with these scales loses."""
    return fit_all([(values_TGD, scales_G)])[0]


def fit_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[FitSums]:
    """`fit` of each; on a GPU in a few launches for all that are of one shape, and waited for once."""
    alike: dict[tuple[torch.Size, torch.Size], list[int]] = {}
    for index, (values, scales) in enumerate(pairs):
        alike.setdefault((values.shape, scales.shape), []).append(index)
    groups = [
        group[start : start + count]
        for (shape, _), group in alike.items()
        for count in [max(1, _TOGETHER_ELEMENTS // max(1, shape.numel()))]
        for start in range(0, len(group), count)
    ]
    sums = [
        _fit_sums(*(torch.stack(parts) for parts in zip(*map(pairs.__getitem__, group), strict=True)))
        for group in groups
    ]
    rows = torch.cat(sums).tolist() if sums else []
    losses = dict(zip((index for group in groups for index in group), rows, strict=True))
    return [
        FitSums(values.numel(), int(losses[index][0]), *losses[index][1:])
        for index, (values, _) in enumerate(pairs)
    ]


def _fit_sums(values_LTGD: Tensor, scales_LG: Tensor) -> Tensor:
    """Return saturated elements, squared error and squared norm of each of L, fp64 `[L, 3]`."""
    scales = scales_LG[:, None]
    each = (1, 2, 3)
    saturated = (~(values_LTGD.float().abs() <= FP8_MAX * _by_head(scales))).sum(each)
    values = values_LTGD.float().nan_to_num(0.0, 0.0, 0.0)
    error = dequantize(quantize(values, scales), scales) - values
    sums = [saturated.double(), error.double().square().sum(each), values.double().square().sum(each)]
    return torch.stack(sums, -1)
