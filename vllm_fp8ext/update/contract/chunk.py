# SPDX-License-Identifier: Apache-2.0
"""A chunk of an update: which tensors came together, whether they are staged, what was wrong with them, and how far the
quantized ones are from what was sent."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_fp8ext.update.contract.tensor_slices import Box
from vllm_fp8ext.update.contract.update_errors import PROBLEMS_LISTED


@dataclass(frozen=True, slots=True)
class QuantizationErrorSums:
    """Sums over tensors: squared errors, squared norms, and relative errors, ‖w - dequantized‖ / ‖w‖; and the largest of
    these, with the tensor's name."""

    squared: float = 0.0
    norm: float = 0.0
    relative: float = 0.0
    tensors: int = 0
    worst: tuple[float, str] = (0.0, "")

    @classmethod
    def of(cls, errors: Mapping[str, tuple[float, float]]) -> "QuantizationErrorSums":
        """Sum up squared error and squared norm by tensor; tensors without values don't count."""
        by_tensor = [((error / norm) ** 0.5, name) for name, (error, norm) in errors.items() if norm]
        squared, norm = (sum(pair[part] for pair in errors.values()) for part in (0, 1))
        relative = sum(error for error, _ in by_tensor)
        return cls(squared, norm, relative, len(by_tensor), max(by_tensor, default=(0.0, "")))

    def __add__(self, other: "QuantizationErrorSums") -> "QuantizationErrorSums":
        return QuantizationErrorSums(
            self.squared + other.squared,
            self.norm + other.norm,
            self.relative + other.relative,
            self.tensors + other.tensors,
            max(self.worst, other.worst),
        )


@dataclass
class Chunk:
    """A set of tensors that came together and is replaced together."""

    names: frozenset[str]
    """Names that it has brought: none any more once it was refused."""
    bytes: int
    sha256: str | None = None
    """SHA-256 of all that came, in hexadecimal, where it was checked."""
    staged: bool = False
    problems: list[dict[str, Any]] = field(default_factory=list)
    """The first of them."""
    problem_count: int = 0
    error: QuantizationErrorSums = QuantizationErrorSums()
    refused: frozenset[str] = frozenset()
    """Names of a chunk that was refused."""
    sent: Mapping[str, str] = field(default_factory=dict)
    """Names under which tensors were sent, by the manifest's name, where they differ."""
    boxes: Mapping[str, list[Box]] = field(default_factory=dict)
    """Boxes of slices that it has brought, by tensor."""

    @property
    def busy(self) -> bool:
        return not self.staged and not self.problems

    def done(
        self, problems: list[dict[str, Any]], errors: Mapping[str, tuple[float, float]] | None = None
    ) -> None:
        """Every rank has staged it; `errors`: squared quantization error and squared norm by tensor. One with problems counts
        as not sent, also when it was staged before: its tensors are missing again."""
        self.staged = not problems
        if problems:
            listed = with_sent_names(problems[:PROBLEMS_LISTED], self.sent)
            self.problems, self.problem_count = listed, len(problems)
            self.error = QuantizationErrorSums()
            self.refused, self.names, self.boxes = self.names, frozenset(), {}
        else:
            self.error = QuantizationErrorSums.of(errors or {})

    def as_dict(self) -> dict[str, Any]:
        return {
            "staged": self.staged,
            "busy": self.busy,
            "bytes": self.bytes,
            "tensors": len(self.names),
            "sha256": self.sha256,
        }


def with_sent_names(problems: Iterable[dict[str, Any]], sent: Mapping[str, str]) -> list[dict[str, Any]]:
    """Add to problems of tensors that came under another name than the manifest's, `sent_as`: that name."""
    return [
        {**problem, "sent_as": sent[problem["tensor"]]} if problem.get("tensor") in sent else problem
        for problem in problems
    ]


def quantization_error(chunks: Iterable[Chunk]) -> dict[str, Any] | None:
    """Relative error of the quantized weights, ‖w - dequantized‖ / ‖w‖: over all of them, and by tensor."""
    total = sum((chunk.error for chunk in chunks), QuantizationErrorSums())
    if not total.tensors:
        return None
    return {
        "relative": (total.squared / total.norm) ** 0.5,
        "mean": total.relative / total.tensors,
        "max": total.worst[0],
        "worst": total.worst[1],
    }
