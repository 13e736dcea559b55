# SPDX-License-Identifier: Apache-2.0
"""Weights that sampled each token, read from the `weight_versions` of a server's answers."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

FIELDS = ("version", "start", "end", "epoch")
"""Fields that a span must have; `instance` may be missing or null."""


class WeightVersion(NamedTuple):
    """Weights that a server had: one life of an engine, its epoch, and the trainer's name for them."""

    instance: str | None
    epoch: int
    version: str


def version_indices(
    weight_versions: Sequence[Sequence[Mapping[str, Any]]], counted: Tensor
) -> tuple[list[WeightVersion], Tensor]:
    """Return the versions, by instance and epoch, and each token's index among them.

    Args:
        weight_versions: spans of each sequence. Empty spans (`start` equal to `end`) sampled no token.
        counted: bool `[batch, tokens]`, the tokens that must have a version.

    Returns:
        Versions, and int64 `[batch, tokens]` on the device of `counted`, -1 for tokens that no span has.

    Raises:
        ValueError: Spans that don't fit, all of them listed.
    """
    batch, tokens = counted.shape
    if len(weight_versions) != batch:
        raise ValueError(
            f"weight_versions: expected spans of {batch} sequences, found {len(weight_versions)}"
        )
    if problems := list(_problems(weight_versions, tokens)):
        raise ValueError("\n".join(problems))
    spans = [
        (row, span["start"], span["end"], WeightVersion(span.get("instance"), span["epoch"], span["version"]))
        for row, sequence in enumerate(weight_versions)
        for span in sequence
    ]
    order = {(version.instance or "", version.epoch, version.version): version for *_, version in spans}
    versions = [order[key] for key in sorted(order)]
    numbers = {version: number for number, version in enumerate(versions)}
    indices = torch.full((batch, tokens), -1, dtype=torch.int64)
    overlaps = []
    for row, start, end, version in spans:
        if (indices[row, start:end] != -1).any():
            overlaps.append(
                f"weight_versions[{row}]: expected spans apart, found [{start}, {end}) over another"
            )
        indices[row, start:end] = numbers[version]
    missing = (counted.cpu() & (indices == -1)).nonzero().tolist()
    if missing:
        row, column = missing[0]
        overlaps.append(
            f"weight_versions: expected a span for each token that counts, found {len(missing)} tokens without, "
            f"the first at sequence {row}, token {column}"
        )
    if overlaps:
        raise ValueError("\n".join(overlaps))
    return versions, indices.to(counted.device)


def _problems(weight_versions: Sequence[Sequence[Mapping[str, Any]]], tokens: int) -> Iterator[str]:
    """Tell which spans lack a field or lie outside the columns."""
    for row, sequence in enumerate(weight_versions):
        for span in sequence:
            lacking = [field for field in FIELDS if field not in span]
            if lacking:
                yield f"weight_versions[{row}]: expected fields {', '.join(FIELDS)}, found none of {', '.join(lacking)}"
            elif not 0 <= span["start"] <= span["end"] <= tokens:
                yield (
                    f"weight_versions[{row}]: expected 0 <= start <= end <= {tokens}, "
                    f"found [{span['start']}, {span['end']})"
                )
