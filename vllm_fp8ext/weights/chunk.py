# SPDX-License-Identifier: Apache-2.0
"""A chunk of an update: which tensors came together, whether they are staged, what was wrong with them, and how far the
quantized ones are from what was sent."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Chunk:
    """A set of tensors that came together and is replaced together."""

    names: frozenset[str]
    """What it has brought: nothing any more once it was refused."""
    bytes: int
    staged: bool = False
    problems: list[dict[str, Any]] = field(default_factory=list)
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Squared quantization error and squared norm by tensor."""
    refused: frozenset[str] = frozenset()
    """Names of a chunk that was refused."""

    @property
    def busy(self) -> bool:
        return not self.staged and not self.problems

    def done(
        self, problems: list[dict[str, Any]], errors: Mapping[str, tuple[float, float]] | None = None
    ) -> None:
        """Every rank has staged it. One with problems counts as not sent: its tensors are missing again."""
        if problems:
            self.problems = problems
            self.refused, self.names = self.names, frozenset()
        else:
            self.staged = True
            self.errors = dict(errors or {})

    def as_dict(self) -> dict[str, Any]:
        return {"staged": self.staged, "busy": self.busy, "bytes": self.bytes, "tensors": len(self.names)}


def quantization_error(chunks: Iterable[Chunk]) -> dict[str, Any] | None:
    """Relative error of the quantized weights, ‖w - dequantized‖ / ‖w‖: over all of them, and by tensor."""
    sums = {name: pair for chunk in chunks for name, pair in chunk.errors.items() if pair[1]}
    if not sums:
        return None
    total_error, total_norm = (sum(pair[part] for pair in sums.values()) for part in (0, 1))
    by_tensor = {name: (error / norm) ** 0.5 for name, (error, norm) in sums.items()}
    worst = max(by_tensor, key=lambda name: (by_tensor[name], name))
    return {
        "relative": (total_error / total_norm) ** 0.5,
        "mean": sum(by_tensor.values()) / len(by_tensor),
        "max": by_tensor[worst],
        "worst": worst,
    }
