# SPDX-License-Identifier: Apache-2.0
"""Results of the methods of a rank, and all ranks' results made one. They travel as they are: vLLM pickles them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias, TypeVar

from vllm_fp8ext.errors import Failure
from vllm_fp8ext.kv_types import RankScales, Scales
from vllm_fp8ext.update.contract.manifest import Manifest

Fits: TypeAlias = dict[str, dict[str, dict[str, Any]]]
"""Sums of `kernels.attention.kv_cache.FitSums` by layer, then by `k` and `v`."""


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """A call did its work, or started a job, and has nothing to tell."""


@dataclass(frozen=True, kw_only=True)
class RankProgress:
    """A job goes on. `again`: polls make it go on; `tensors` counts its slices then."""

    tensors: int = 0
    again: bool = False


@dataclass(frozen=True, kw_only=True)
class RankDescription:
    """The manifest of one rank, and the memory that its shadow takes.

    `untried`: kinds of layers for which prompts can't be run through new weights.
    """

    manifest: Manifest
    fingerprint: int
    shadow_bytes: int
    shadow_kv_blocks: int
    untried: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StagedTensors:
    """A chunk was staged. `errors`: squared error and squared norm by quantized tensor."""

    problems: list[dict[str, Any]] = field(default_factory=list)
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)


class LoadKind(StrEnum):
    """Kind of a call on the served model, by which somebody else loads weights."""

    BEGIN = "begin"
    """An update begins: what came before belongs to none."""
    AGAIN = "again"
    """A tensor comes for the second time: an update begins, and it must be whole."""
    TENSORS = "tensors"
    END = "end"
    """Everything has come."""


@dataclass(frozen=True, kw_only=True)
class LoadEvent:
    """One call on a model. `call`: its name, or the tensor's that came again.

    `tensors`: `(name, shape, dtype)` as they came, `bytes` together; `staged`: what became of them, or why nothing did.
    `kv_scales`: values of tensors that are named as scales of the KV cache.
    """

    kind: LoadKind
    call: str = ""
    tensors: list[tuple[str, tuple[int, ...], str]] = field(default_factory=list)
    bytes: int = 0
    staged: StagedTensors | Failure = field(default_factory=StagedTensors)
    kv_scales: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """Calls on a model since they were asked for last, in order."""

    events: list[LoadEvent]


@dataclass(frozen=True, kw_only=True)
class CanaryScore:
    """Summed log-probability of `tokens` tokens, in nats. A rank without logits has none."""

    logprob: float = 0.0
    tokens: int = 0
    finite: bool = True


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Fingerprint of a copy of the weights, and the canary's score where that ran beside."""

    fingerprint: int
    seconds: float = 0.0
    canary: CanaryScore | None = None


@dataclass(frozen=True, kw_only=True)
class SwapTime:
    """Seconds that the swap took on the rank's device."""

    seconds: float


@dataclass(frozen=True, kw_only=True)
class RankDigests:
    """SHA-256 by checkpoint tensor and one over all addresses, and the KV cache's scales."""

    rank: int
    digests: dict[str, str]
    addresses: str
    kv_scales: RankScales = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Tokens that the first scales were calibrated with, and how well the scales fit them."""

    amax: Scales
    source: str
    tokens: int
    fits: Fits


@dataclass(frozen=True, kw_only=True)
class ServedKvScales:
    """Scales that one rank serves. `calibration`: None where the first ones came from elsewhere."""

    scales: RankScales
    calibration: Calibration | None = None


@dataclass(frozen=True, kw_only=True)
class KvAmax:
    """Largest magnitudes of queries, keys and values that the canary's tokens made."""

    amax: RankScales


@dataclass(frozen=True, kw_only=True)
class KvFits:
    """How well staged scales fit what was observed."""

    fits: Fits = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class KvTraffic:
    """Values written into the cache since the last call. `traffic`: `elements` and `saturated` by layer and kind."""

    amax: RankScales
    traffic: dict[str, dict[str, dict[str, int]]]


@dataclass(frozen=True, kw_only=True)
class KvRescaled:
    """Cached codes that were rewritten, clamped to the largest code, and flushed to zero."""

    codes: int = 0
    saturated: int = 0
    flushed: int = 0


RankResult: TypeAlias = (
    Accepted
    | CanaryScore
    | Failure
    | Fingerprint
    | KvAmax
    | KvFits
    | KvRescaled
    | KvTraffic
    | Loaded
    | RankDescription
    | RankDigests
    | RankProgress
    | ServedKvScales
    | StagedTensors
    | SwapTime
)

R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class RankReply:
    """A result with the `call` that it answers and the `rank` that it is from.

    `compiled`: kernels and graphs that the process has compiled, by compiler; None where nobody counted.
    """

    call: int
    rank: int
    result: RankResult
    compiled: dict[str, int] | None = None


def failures(results: Sequence[RankResult]) -> list[Failure]:
    """Return the results of ranks that failed."""
    return [result for result in results if isinstance(result, Failure)]


def raise_first(results: Sequence[RankResult]) -> None:
    """Raise the `UpdateError` of the first rank that failed."""
    for failure in failures(results):
        raise failure.error


def all_of(kind: type[R], results: Sequence[RankResult]) -> list[R]:
    """Return all ranks' results, which are of one kind.

    Raises:
        UpdateError: the first rank's that failed.
        TypeError: a rank answered something else.
    """
    raise_first(results)
    typed: list[R] = [result for result in results if isinstance(result, kind)]
    if len(typed) < len(results):
        raise TypeError(f"expected {kind.__name__} of every rank, found {results}")
    return typed


def distinct(problems: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge problems of all ranks: each tensor once."""
    seen = {(problem["kind"], problem["tensor"]): problem for problem in problems}
    return [{key: value for key, value in problem.items() if key != "rank"} for problem in seen.values()]


def summed(results: Sequence[StagedTensors]) -> dict[str, tuple[float, float]]:
    """Add squared quantization error and squared norm by tensor, over all ranks."""
    if len(results) == 1:  # experts of a large model are thousands
        return dict(results[0].errors)
    sums: dict[str, tuple[float, float]] = {}
    for result in results:
        for name, (error, norm) in result.errors.items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = before[0] + error, before[1] + norm
    return sums
