# SPDX-License-Identifier: Apache-2.0
"""Profiles of GPU time, by kernel."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

Span = tuple[str, float, float]
"""Name, start and end of a kernel (or a copy, or a fill), in microseconds."""


@dataclass(frozen=True)
class GpuTime:
    """Kernels that ran between the first start and the last end, `milliseconds` apart."""

    milliseconds: float
    kernels: list[tuple[str, float, int]]
    """Name, milliseconds and launches of each, the longest first."""

    @property
    def busy(self) -> float:
        """Milliseconds in which anything ran."""
        return sum(milliseconds for _, milliseconds, _ in self.kernels)

    @classmethod
    def of(cls, spans: Iterable[Span]) -> "GpuTime":
        """Charge each kernel from the end of all that began before it.

        A kernel that is launched early waits for the one before it, and both seem to run: no microsecond counts twice."""
        charged: defaultdict[str, float] = defaultdict(float)
        launches: Counter[str] = Counter()
        first, last = math.inf, -math.inf
        for name, start, end in sorted(spans, key=lambda span: span[1:]):
            charged[name] += max(0, end - max(start, last))
            launches[name] += 1
            first, last = min(first, start), max(last, end)
        longest = sorted(charged.items(), key=lambda kernel: -kernel[1])
        kernels = [(name, microseconds / 1e3, launches[name]) for name, microseconds in longest]
        return cls((last - first) / 1e3 if kernels else 0.0, kernels)
