# SPDX-License-Identifier: Apache-2.0
"""Tied tensors: an output layer that is served as the embedding, and the embedding.

The first that comes in an update is written to the place that they share, the others are compared with it, in any order and
any chunks.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping


class TiedTensors:
    """Tied tensors of one rank that have come. For the staging thread.

    `tied`: by the name of each output layer, the embedding's.
    """

    def __init__(self, tied: Mapping[str, str]) -> None:
        self._embedding_of = {**tied, **{name: name for name in tied.values()}}
        self._arrived: dict[str, set[str]] = defaultdict(set)
        self._is_compared: dict[str, bool] = {}
        self._in_chunk: set[str] = set()

    def reset(self) -> None:
        """Forget what came: a new update begins."""
        self._arrived.clear()

    def begin(self, names: Collection[str], others: Collection[str]) -> frozenset[str]:
        """Begin a chunk of these tensors, while `others` are in other chunks; return those that must be staged as rows."""
        self._in_chunk, self._is_compared = self._embedding_of.keys() & set(names), {}
        for arrived in self._arrived.values():
            arrived.intersection_update(others)
        beside = [self._embedding_of[name] for name in (*self._in_chunk, *others)]
        return frozenset(name for name in self._in_chunk if beside.count(self._embedding_of[name]) > 1)

    def compares(self, name: str) -> bool:
        """Tell whether a tensor is compared with what another one has written, instead of written."""
        if name not in self._in_chunk:
            return False
        if name not in self._is_compared:
            arrived = self._arrived[self._embedding_of[name]]
            self._is_compared[name] = bool(arrived - {name})
            arrived.add(name)
        return self._is_compared[name]

    def end(self, good: Collection[str]) -> None:
        """End the chunk, of whose tensors only these count as arrived."""
        for name in self._in_chunk:
            arrived = self._arrived[self._embedding_of[name]]
            arrived.add(name) if name in good else arrived.discard(name)
