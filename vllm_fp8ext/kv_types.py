# SPDX-License-Identifier: Apache-2.0
"""Types of KV-cache scales that layers, workers, the engine and clients share.

Imports neither torch nor vLLM.
"""

import hashlib
import struct
from dataclasses import dataclass
from typing import Any

NAMES = ("q", "k", "v")
Scales = dict[str, dict[str, list[float]]]
"""Scales by layer and by one of `NAMES`: one number, or one of each KV head."""
RankScales = dict[str, dict[str, list[float | None]]]
"""Scales of one rank: None for heads that others have."""


def scale_digests(scales: Scales) -> dict[str, dict[str, str]]:
    """Hash scales by layer and kind: the SHA-256 of those of all heads as little-endian fp32."""
    return {
        layer: {
            kind: hashlib.sha256(struct.pack(f"<{len(values)}f", *values)).hexdigest()
            for kind, values in kinds.items()
        }
        for layer, kinds in scales.items()
    }


def write_host_copies(layer: Any, kind: str, value: float) -> None:
    """Give an attention layer one of its scales wherever vLLM keeps it in host memory."""
    setattr(layer, f"_{kind}_scale_float", value)
    copy = getattr(layer, f"_{kind}_scale_cpu", None)
    if copy is not None:
        copy.fill_(value)


@dataclass(frozen=True)
class HeadShare:
    """KV heads of a layer, of `total` in all, that are on this rank."""

    first: int
    count: int
    total: int

    @classmethod
    def of(cls, rank: int, world_size: int, total: int) -> "HeadShare":
        """Ranks share heads out, or several ranks have the same one."""
        count = max(1, total // world_size)
        return cls(rank * total // world_size // count * count, count, total)
