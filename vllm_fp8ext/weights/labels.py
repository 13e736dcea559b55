# SPDX-License-Identifier: Apache-2.0
"""How epoch and version travel through vLLM, which carries one opaque string per token span."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

_SEPARATOR, _REQUESTS = "\x1f", "\x1e"


class Label(NamedTuple):
    """Which weights sampled a token: the server's epoch and the trainer's version, which may repeat."""

    epoch: int
    version: str

    def encode(self) -> str:
        return f"{self.epoch}{_SEPARATOR}{self.version}"

    @classmethod
    def decode(cls, text: str) -> "Label":
        """The label in a string that `encode` made; any other (vLLM's own `default`) is epoch 0."""
        epoch, separator, version = text.partition(_SEPARATOR)
        return cls(int(epoch), version) if separator else cls(0, default_version(0))


class Step(NamedTuple):
    """What a step says of its tokens: `label`, encoded, of the weights that sampled all of them; and for single requests, by
    id, the encoded labels of older weights that computed K and V of theirs."""

    label: str
    held: Mapping[str, Sequence[str]] = {}

    def encode(self) -> str:
        return f"{self.label}{_REQUESTS}{json.dumps(self.held)}" if self.held else self.label

    @classmethod
    def decode(cls, text: str) -> "Step":
        """What `encode` made a string of; any other is a label."""
        return _decoded(text) if _REQUESTS in text else cls(text)


@lru_cache(maxsize=8)
def _decoded(text: str) -> Step:
    """Each request of a step asks."""
    label, _, held = text.rpartition(_REQUESTS)
    return Step(label, json.loads(held))


def default_version(epoch: int) -> str:
    """The version of an update that names none."""
    return f"epoch-{epoch}"
