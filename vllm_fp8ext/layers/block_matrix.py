# SPDX-License-Identifier: Apache-2.0
"""The matrices that a quantized layer is made of: one of a linear layer, three of each expert."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class BlockMatrix:
    """A matrix with block scales of its own, as a layer holds it.

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
class ServedMatrix:
    """Live codes and scales, and the paths of the two tensors that they lie in."""

    codes: Tensor
    scales: Tensor
    paths: tuple[str, str]


def served_matrices(layers: Iterable[tuple[str, Any]]) -> dict[str, ServedMatrix]:
    """Return the matrices of quantized layers that hold codes and scales, by target.

    `layers`: each with its path.
    """
    served = {}
    for path, layer in layers:
        matrices: Iterable[BlockMatrix] = layer.quant_method.matrices(layer)
        for matrix in matrices:
            assert matrix.scales is not None
            paths = f"{path}.{matrix.parameter}", f"{path}.{matrix.scale_parameter}"
            served[f"{path}.{matrix.name}"] = ServedMatrix(matrix.values, matrix.scales, paths)
    return served


def tensor_paths(targets: Iterable[str], matrices: Mapping[str, ServedMatrix]) -> frozenset[str]:
    """Return paths of the tensors that hold these targets; of quantized ones those of the scales too."""
    return frozenset(
        path for target in targets for path in (matrices[target].paths if target in matrices else (target,))
    )
