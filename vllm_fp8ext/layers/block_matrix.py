# SPDX-License-Identifier: Apache-2.0
"""The matrices that a quantized layer is made of: one of a linear layer, three of each expert."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """One matrix whose blocks are its own.

    `name`: below the layer. `values`: view `[N, K]` of what the layer holds under `parameter`, without its padding: codes, or
    values of the checkpoint's dtype as long as nothing is allocated. `scales`: fp32, one per 128x128 block, a view of
    what lies under `scale_parameter`; None as long as nothing is allocated.
    """

    name: str
    values: Tensor
    scales: Tensor | None
    parameter: str
    scale_parameter: str


@dataclass(frozen=True, slots=True)
class ServedPart:
    """Live codes and scales, and the paths of the two tensors that they lie in."""

    codes: Tensor
    scales: Tensor
    paths: tuple[str, str]


def served_parts(layers: Iterable[tuple[str, Any]]) -> dict[str, ServedPart]:
    """By target, of quantized layers that hold codes and scales, each with its path."""
    found = {}
    for path, layer in layers:
        parts: Iterable[Part] = layer.quant_method.parts(layer)
        for part in parts:
            assert part.scales is not None
            paths = f"{path}.{part.parameter}", f"{path}.{part.scale_parameter}"
            found[f"{path}.{part.name}"] = ServedPart(part.values, part.scales, paths)
    return found


def holders(targets: Iterable[str], parts: Mapping[str, ServedPart]) -> frozenset[str]:
    """Paths of the tensors that hold these targets, and of the scales of those that are quantized."""
    return frozenset(
        path for target in targets for path in (parts[target].paths if target in parts else (target,))
    )
