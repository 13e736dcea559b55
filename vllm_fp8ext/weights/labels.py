# SPDX-License-Identifier: Apache-2.0
"""How epoch and version travel through vLLM, which carries one opaque string per token span."""

from typing import NamedTuple

_SEPARATOR = "\x1f"


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


def default_version(epoch: int) -> str:
    """The version of an update that names none."""
    return f"epoch-{epoch}"
