# SPDX-License-Identifier: Apache-2.0
"""Counts over the life of one engine, for metrics."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_fp8ext.update.engine.session import State


@dataclass
class Totals:
    """`outcomes` counts ended updates and rollbacks, `phases` holds count and seconds, `stalls` likewise; `restarts` counts
    prompts that began again, and the tokens of theirs that were computed before."""

    outcomes: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys((*(s for s in State if s.ended), "rolled-back"), 0)
    )
    phases: dict[str, list[float]] = field(default_factory=dict)
    stalls: list[float] = field(default_factory=lambda: [0, 0.0])
    restarts: list[int] = field(default_factory=lambda: [0, 0])
    bytes: int = 0

    def ended(self, outcome: str) -> None:
        """An update ended, or a rollback was done."""
        self.outcomes[outcome] += 1

    def took(self, seconds: Mapping[str, float]) -> None:
        """Seconds by phase of an update or a rollback."""
        for phase, duration in seconds.items():
            entry = self.phases.setdefault(phase, [0, 0.0])
            entry[0] += 1
            entry[1] += duration

    def stalled(self, seconds: float) -> None:
        """An exchange held up running requests."""
        self.stalls[0] += 1
        self.stalls[1] += seconds

    def restarted(self, prompts: int, tokens: int) -> None:
        """Count `prompts` that a commit had begin again, and their `tokens` computed before."""
        self.restarts[0] += prompts
        self.restarts[1] += tokens

    def as_dict(self) -> dict[str, Any]:
        return {
            "outcomes": {str(outcome): count for outcome, count in self.outcomes.items()},
            "phases": self.phases,
            "stalls": self.stalls,
            "restarts": self.restarts,
            "bytes": self.bytes,
        }
