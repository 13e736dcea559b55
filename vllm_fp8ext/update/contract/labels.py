# SPDX-License-Identifier: Apache-2.0
"""Epoch, version and instance as one string, which vLLM carries per token span."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

_SEPARATOR, _REQUESTS = "\x1f", "\x1e"


class Label(NamedTuple):
    """Label of the weights that sampled a token: the server's epoch and the trainer's version, which may repeat.

    `instance`: the life of the engine in which epochs are counted; empty where nobody says. `aborted`: the last epoch that
    began with the end of all requests that were running; 0 without one.
    """

    epoch: int
    version: str
    instance: str = ""
    aborted: int = 0

    def next(self, version: str, *, aborts: bool = False) -> "Label":
        """The label of the epoch that follows."""
        epoch = self.epoch + 1
        return Label(epoch, version, self.instance, epoch if aborts else self.aborted)

    def served(self) -> dict[str, Any]:
        """Return what answers say of the weights that are served."""
        return {"epoch": self.epoch, "version": self.version, "instance": self.instance or None}

    def encode(self) -> str:
        return _SEPARATOR.join((str(self.epoch), self.instance, str(self.aborted), self.version))

    @classmethod
    def decode(cls, text: str) -> "Label":
        """The label in a string that `encode` made; any other (vLLM's own `default`) is epoch 0."""
        parts = text.split(_SEPARATOR, 3)
        if len(parts) < 4:
            return first_label("")
        epoch, instance, aborted, version = parts
        return cls(int(epoch), version, instance, int(aborted))


class Step(NamedTuple):
    """A step's word on its tokens.

    `label`: encoded, of the weights that sampled all of them. `held`: for single requests, by id, the encoded labels of older
    weights that computed K and V of theirs.
    """

    label: str
    held: Mapping[str, Sequence[str]] = {}

    def encode(self) -> str:
        return f"{self.label}{_REQUESTS}{json.dumps(self.held)}" if self.held else self.label

    @classmethod
    def decode(cls, text: str) -> "Step":
        """Read a string that `encode` made; any other is a label."""
        return _decoded(text) if _REQUESTS in text else cls(text)


@lru_cache(maxsize=8)
def _decoded(text: str) -> Step:
    """Each request of a step asks."""
    label, _, held = text.rpartition(_REQUESTS)
    return Step(label, json.loads(held))


def first_label(instance: str) -> Label:
    """Label what an engine serves when it begins to live."""
    return Label(0, default_version(0), instance)


def default_version(epoch: int) -> str:
    """The version of an update that names none."""
    return f"epoch-{epoch}"
