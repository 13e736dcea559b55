# SPDX-License-Identifier: Apache-2.0
"""Tensors that are pushed by name: those that stay as they are, and those that are lent for a moment."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from inspect import GEN_SUSPENDED, getgeneratorstate
from types import GeneratorType
from typing import Any

from vllm_fp8ext.serve.tensors import TensorLike

_OWN_ITEMS: tuple[type, ...] = type({}.items()), type(OrderedDict[str, Any]().items())
"""Types of a mapping's `items()` that hold its tensors. Others may make them as they are asked for."""


def end(weights: Any) -> None:
    """End a generator that a push failed to go through, so that it cleans up. One that has not begun stays as it is."""
    if isinstance(weights, GeneratorType) and getgeneratorstate(weights) == GEN_SUSPENDED:
        weights.close()


class Pairs:
    """Tensors by name, to be gone through once.

    Those of a `dict` are complete: they stay as they are until the push has ended. Any other iterable may change a tensor, or
    use its memory for another one, once it is asked for the next: until then it is lent. So may a mapping whose `items()` are
    not a dict's own. `lending=False`: of an iterable, each tensor of which is new.
    """

    def __init__(
        self, weights: Mapping[str, TensorLike] | Iterable[tuple[str, TensorLike]], *, lending: bool = True
    ) -> None:
        pairs = weights.items() if isinstance(weights, Mapping) else weights
        self.complete = isinstance(weights, Mapping) and isinstance(pairs, _OWN_ITEMS)
        self._pairs: Iterable[tuple[str, TensorLike]] = pairs
        self._lending = lending and not self.complete
        self._last: Any = None

    def __iter__(self) -> Iterator[tuple[str, TensorLike]]:
        for item in self._pairs:
            if self._lending and isinstance(item, tuple) and len(item) == 2:
                self._last = item[1]
            yield item
            self._last = None  # nothing holds the tensor while the next one is made
            del item

    def lent(self, tensor: Any) -> bool:
        """Return whether this very tensor was yielded last. It is its owner's again when the next one is asked for."""
        return tensor is not None and tensor is self._last
