# SPDX-License-Identifier: Apache-2.0
"""Tensors that a module computes from its weights, anew and in place when these change.

A module has them if it has an attribute `fp8ext_derived`: `compat.update` gives it one. They are neither loaded nor swapped.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn

ATTRIBUTE = "fp8ext_derived"


@dataclass(frozen=True)
class DerivedTensors:
    """Derived tensors of one module: `names` of its attributes, and what computes all of them anew, in place."""

    names: frozenset[str]
    rebuild: Callable[[], None]


def derived_tensors(model: nn.Module) -> Iterator[tuple[str, DerivedTensors]]:
    """Yield the path of each module that has derived tensors, and what they are."""
    for path, module in model.named_modules():
        derived = getattr(module, ATTRIBUTE, None)
        if derived is not None:
            yield path, derived


def derived_paths(model: nn.Module) -> frozenset[str]:
    """Return the paths of all derived tensors."""
    return frozenset(
        f"{path}.{name}".lstrip(".") for path, derived in derived_tensors(model) for name in derived.names
    )
