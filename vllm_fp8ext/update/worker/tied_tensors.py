# SPDX-License-Identifier: Apache-2.0
"""Tensors that share a place: an output layer that is served as the embedding. The first that comes in an update is written
there, the others are compared with it, in any order and any chunks."""

from collections import defaultdict
from collections.abc import Collection, Mapping


class SharedPlaces:
    """What has come to places that several tensors share, on one rank. `tied`: by the name of each output layer, the
    embedding's. For the staging thread."""

    def __init__(self, tied: Mapping[str, str]) -> None:
        self._places = {**tied, **{name: name for name in tied.values()}}
        self._came: dict[str, set[str]] = defaultdict(set)
        self._compared: dict[str, bool] = {}
        self._here: set[str] = set()

    def reset(self) -> None:
        """Forget what came: a new update begins."""
        self._came.clear()

    def begin(self, names: Collection[str], others: Collection[str]) -> frozenset[str]:
        """Begin a chunk of these tensors, while `others` are in other chunks. Returns those that have to come one by one."""
        self._here, self._compared = self._places.keys() & set(names), {}
        for came in self._came.values():
            came.intersection_update(others)
        beside = [self._places[name] for name in (*self._here, *others)]
        return frozenset(name for name in self._here if beside.count(self._places[name]) > 1)

    def compares(self, name: str) -> bool:
        """Whether a tensor, whose rows are to be staged, is compared with what another one has written."""
        if name not in self._here:
            return False
        if name not in self._compared:
            came = self._came[self._places[name]]
            self._compared[name] = bool(came - {name})
            came.add(name)
        return self._compared[name]

    def end(self, good: Collection[str]) -> None:
        """End the chunk: of its tensors, only these are in."""
        for name in self._here:
            came = self._came[self._places[name]]
            came.add(name) if name in good else came.discard(name)
