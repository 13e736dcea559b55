# SPDX-License-Identifier: Apache-2.0
"""Service-level objectives: `ttft_p99<0.5`."""

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_SIGNS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
LATENCIES = {
    "ttft": "time to first token",
    "itl": "inter-token latency",
    "tpot": "time per output token",
    "e2e": "end to end",
    "schedule_delay": "schedule delay",
    "generator_lag": "lag of the generator",
    "steps": "rollout step",
}
"""Times of a report, and their titles."""
STATISTICS = ("mean", "max", "p50", "p90", "p99", "p99.9")
SINGLE = (
    *("tokens_per_s", "requests_per_s", "goodput_per_s", "achieved_rate", "input_tokens_per_s"),
    *("failed_requests", "failed_updates", "stall_seconds"),
)


@dataclass(frozen=True)
class Slo:
    """`name`: `LATENCY_STATISTIC` or one of `SINGLE`; seconds, counts, or per second."""

    name: str
    sign: str
    limit: float

    @classmethod
    def parse(cls, text: str) -> "Slo":
        """Raises `ValueError` naming what is valid."""
        match = re.fullmatch(r"\s*([a-z0-9_.]+)\s*(<=|>=|<|>)\s*([0-9.eE+-]+)\s*", text)
        try:
            limit = float(match[3]) if match else None
        except ValueError:
            limit = None
        latency, _, statistic = (match[1] if match else "").rpartition("_")
        known = match and (match[1] in SINGLE or (latency in LATENCIES and statistic in STATISTICS))
        if not match or limit is None or not known:
            raise ValueError(
                f"SLO: expected NAME<VALUE (or >, <=, >=), NAME one of {', '.join(SINGLE)}, or "
                f"{'|'.join(LATENCIES)}_{'|'.join(STATISTICS)}; found {text!r}"
            )
        return cls(match[1], match[2], limit)

    def holds(self, value: float) -> bool:
        """Return whether a value keeps the objective."""
        return _SIGNS[self.sign](value, self.limit)

    def value(self, measured: Mapping[str, Any]) -> float | None:
        """Return what was measured (`run_metrics.analyse`); None where nothing was."""
        if self.name in SINGLE:
            return float(measured[self.name])
        latency, _, statistic = self.name.rpartition("_")
        value = measured[latency].get(statistic)
        return None if value is None else float(value)

    def __str__(self) -> str:
        return f"{self.name}{self.sign}{self.limit:g}"


def verdicts(slos: list[Slo], measured: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each SLO with what was measured; what was not measured is not kept."""
    results = []
    for slo in slos:
        value = slo.value(measured)
        results.append({"slo": str(slo), "found": value, "kept": value is not None and slo.holds(value)})
    return results
