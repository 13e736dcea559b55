# SPDX-License-Identifier: Apache-2.0
"""Keeps specifications of tensors, which are the same in every update."""

from typing import Any

from vllm_fp8ext.update.contract.manifest import TensorSpec
from vllm_fp8ext.update.contract.safetensors_header import StoredTensor

KEPT = 1 << 17
"""Specifications that are kept: more than a model has tensors. Slices have other names in each sparse update."""


class SpecCache:
    """Turns lists of tensors into `StoredTensor`s. The same specification is always the same object.

    The plan for staging is looked up by its identity, since there may be thousands of experts.
    """

    def __init__(self) -> None:
        self._last: tuple[Any, list[TensorSpec]] = None, []
        self._specs: dict[tuple[str, tuple[int, ...], str], TensorSpec] = {}

    def stored(self, tensors: list[Any]) -> list[StoredTensor]:
        """Return tensors of `[name, shape, dtype, start, bytes]` each."""
        if not tensors:
            return []
        names, shapes, dtypes, starts, sizes = zip(*tensors, strict=True)
        if self._last[0] != (names, shapes, dtypes):
            if len(self._specs) > KEPT:
                self._specs.clear()
            keys = zip(names, map(tuple, shapes), dtypes, strict=True)
            specs = [self._specs.get(key) or self._specs.setdefault(key, TensorSpec(*key)) for key in keys]
            self._last = (names, shapes, dtypes), specs
        return list(map(StoredTensor, self._last[1], starts, sizes))
