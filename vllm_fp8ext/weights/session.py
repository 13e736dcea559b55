# SPDX-License-Identifier: Apache-2.0
"""One update from open to its end, as a pure state machine: no torch, no vLLM, no I/O.

    open ──prepare──▶ prepared ──commit──▶ committed
     ▲  ╲               │   ╲
     └─chunk────────────┘    ╲──abandon──▶ abandoned

A chunk that arrives after `prepare` reopens the update. Ends are final and are kept for reading.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.weights.manifest import Manifest, TensorSpec


class State(StrEnum):
    """Where an update stands."""

    OPEN = "open"
    PREPARED = "prepared"
    COMMITTED = "committed"
    ABANDONED = "abandoned"


class Running(StrEnum):
    """What happens at the commit to requests that are running."""

    KEEP = "keep"
    """Their cached K and V stay; the rest is sampled by the new weights."""
    RECOMPUTE = "recompute"
    """They are preempted and their K and V computed again by the new weights."""


@dataclass
class Chunk:
    """A set of tensors that came together and is replaced together."""

    names: frozenset[str]
    bytes: int
    staged: bool = False
    problems: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Session:
    """State of one update. Methods raise `UpdateError` for a call that the state does not allow."""

    id: str
    version: str
    running: Running
    manifest: Manifest
    base_epoch: int | None = None
    state: State = State.OPEN
    chunks: dict[str, Chunk] = field(default_factory=dict)
    result: dict[str, Any] | None = None
    opened_at: float = field(default_factory=time.time)
    seconds: dict[str, float] = field(default_factory=dict)
    squared_error: float = 0.0
    squared_norm: float = 0.0

    def receive(self, key: str, specs: Iterable[TensorSpec], size: int) -> None:
        """A chunk arrived and is about to be staged. Sending a key again replaces what it brought.

        Raises:
            UpdateError: wrong state, or (as one report) every tensor that does not fit.
        """
        self._require_live("send a chunk to")
        specs = list(specs)
        existing = self.chunks.get(key)
        if existing is not None and not existing.staged and not existing.problems:
            raise UpdateError(
                "chunk-busy", f"chunk {key} is still being staged: send it again when it is done"
            )
        problems = self.manifest.problems(specs)
        for other_key, other in self.chunks.items():
            if other_key != key:
                repeated = {spec.name for spec in specs} & other.names - self.manifest.ignored
                problems += [
                    {"kind": "duplicate-tensor", "tensor": name, "chunk": other_key}
                    for name in sorted(repeated)
                ]
        if problems:
            raise refusal(problems)
        self.state = State.OPEN
        self.chunks[key] = Chunk(frozenset(spec.name for spec in specs), size)

    def staged(self, key: str, problems: list[dict[str, Any]]) -> None:
        """Every rank has staged a chunk. One with problems counts as not sent: its tensors are missing again."""
        chunk = self.chunks[key]
        if problems:
            chunk.problems = problems
            chunk.names = frozenset()
        else:
            chunk.staged = True

    def missing(self) -> list[str]:
        """Required tensors that no staged chunk has brought."""
        have = {name for chunk in self.chunks.values() if chunk.staged for name in chunk.names}
        return sorted(self.manifest.tensors.keys() - have)

    def prepare(self, epoch: int) -> None:
        """Check that the update could be committed now. Idempotent.

        Raises:
            UpdateError: `stale-base`, `staging`, or `incomplete` with every missing tensor and every refused chunk.
        """
        if self.state is State.COMMITTED:
            return
        self._require_live("prepare")
        self.check_base(epoch)
        if any(not chunk.staged and not chunk.problems for chunk in self.chunks.values()):
            raise UpdateError("staging", "chunks are still being staged: prepare when they are done")
        missing = self.missing()
        if missing:
            refused = [problem for chunk in self.chunks.values() for problem in chunk.problems]
            raise UpdateError(
                "incomplete",
                f"the update lacks {len(missing)} of {len(self.manifest.tensors)} tensors: {_some(missing)}",
                status=422,
                missing=missing,
                problems=refused,
            )
        self.state = State.PREPARED

    def check_base(self, epoch: int) -> None:
        """Refuse an update that was made for other weights than those that are served."""
        if self.base_epoch is not None and self.base_epoch != epoch:
            raise UpdateError(
                "stale-base",
                f"the update was made for epoch {self.base_epoch}; epoch {epoch} is served",
                expected=self.base_epoch,
                found=epoch,
            )

    def commit(self, result: dict[str, Any]) -> None:
        """The exchange is done on every rank."""
        if self.state is not State.PREPARED:
            raise UpdateError("wrong-state", f"can't commit: the update is {self.state}")
        self.state = State.COMMITTED
        self.result = result

    def forget(self) -> None:
        """What was staged is lost: everything must be sent again."""
        self.state = State.OPEN
        self.chunks.clear()

    def abandon(self) -> None:
        """Give the update up. Idempotent; a committed one can't be."""
        if self.state is State.COMMITTED:
            raise UpdateError("wrong-state", "can't abandon: the update is committed (roll back instead)")
        self.state = State.ABANDONED

    @property
    def live(self) -> bool:
        return self.state in (State.OPEN, State.PREPARED)

    def as_dict(self) -> dict[str, Any]:
        missing = self.missing() if self.live else []
        return {
            "id": self.id,
            "state": str(self.state),
            "version": self.version,
            "running": str(self.running),
            "base_epoch": self.base_epoch,
            "opened_at": self.opened_at,
            "tensors_required": len(self.manifest.tensors),
            "tensors_missing": len(missing),
            "missing": missing,
            "bytes": sum(chunk.bytes for chunk in self.chunks.values() if chunk.staged),
            "chunks": {
                key: {"staged": chunk.staged, "bytes": chunk.bytes, "tensors": len(chunk.names)}
                for key, chunk in self.chunks.items()
            },
            "problems": [problem for chunk in self.chunks.values() for problem in chunk.problems],
            "seconds": dict(self.seconds),
            "quantization_error": self.quantization_error,
            "result": self.result,
        }

    @property
    def quantization_error(self) -> float | None:
        """Relative error of the quantized weights, ‖w - dequantized‖ / ‖w‖ over all of them."""
        return (self.squared_error / self.squared_norm) ** 0.5 if self.squared_norm else None

    def _require_live(self, action: str) -> None:
        if not self.live:
            raise UpdateError("wrong-state", f"can't {action} this update: it is {self.state}")


def refusal(problems: list[dict[str, Any]]) -> UpdateError:
    """One error for everything wrong with a chunk; its kind is the problems' when they agree."""
    kinds = {problem["kind"] for problem in problems}
    lines = [
        " ".join(f"{key} {value}" for key, value in problem.items() if key != "kind") for problem in problems
    ]
    described = [f"{problem['kind']}: {line}" for problem, line in zip(problems, lines, strict=True)]
    kind = kinds.pop() if len(kinds) == 1 else "invalid-tensors"
    return UpdateError(
        kind, f"{len(problems)} problems: {_some(described, '; ')}", status=422, problems=problems
    )


def _some(items: list[str], separator: str = ", ", limit: int = 8) -> str:
    more = f"{separator}and {len(items) - limit} more" if len(items) > limit else ""
    return separator.join(items[:limit]) + more
