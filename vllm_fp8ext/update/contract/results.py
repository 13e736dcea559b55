# SPDX-License-Identifier: Apache-2.0
"""Results of the update engine's operations, as the API server gets them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias, get_args

from vllm_fp8ext.errors import Failure


class AnswerFields:
    """A result that is the body of an answer."""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, by name."""
        return {each.name: getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Done:
    """An operation did what it should, and has nothing to tell."""


@dataclass(frozen=True, kw_only=True)
class JobStarted:
    """The operation goes on as a job, which the caller polls. It ends in `soonest` seconds at the earliest."""

    job: int
    soonest: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A job goes on. `step`: counts the calls to the ranks that it consists of; `tensors`: done in this one.

    `again`: polls make it go on, or this one has waited: the next one may come at once.
    """

    step: int
    tensors: int = 0
    again: bool = False


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """The operation waits for `requests` running requests, or for another call: call again."""

    requests: int


@dataclass(frozen=True, kw_only=True)
class Stale:
    """Other weights came while the served ones were read: call again."""


@dataclass(frozen=True, kw_only=True)
class Joined:
    """An API server process is known; `pids`: numbers of the engine cores' processes."""

    pids: list[int]


@dataclass(frozen=True, kw_only=True)
class Lifetime:
    """Seconds without activity after which an update expires."""

    seconds: float


@dataclass(frozen=True, kw_only=True)
class ServedManifest:
    """The manifest of the engine, as `Manifest.as_dict` makes it."""

    manifest: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class UpdateState(AnswerFields):
    """State of one update: the fields of `serve.schema.Update`. The last two are told on opening."""

    id: str
    state: str
    version: str
    running: str
    base_epoch: int | None
    opened_at: float
    expires_at: float | None
    partial: bool
    sparse: bool = False
    world_size: int
    tensors_required: int
    tensors_missing: int
    missing: list[str]
    bytes: int
    chunks: dict[str, dict[str, Any]]
    problems: list[dict[str, Any]]
    problem_count: int
    seconds: dict[str, float]
    quantization_error: dict[str, Any] | None
    canary_perplexity: float | None
    kv_scales: dict[str, Any] | None
    result: dict[str, Any] | None
    max_chunk_bytes: int | None = None
    group: str | None = None


@dataclass(frozen=True, kw_only=True)
class EngineStatus(AnswerFields):
    """Served weights and what stands by: the fields of `serve.schema.Weights`, and those of metrics alone."""

    epoch: int
    version: str
    instance: str | None
    state: str
    poisoned: str | None
    update: str | None
    previous_version: str | None
    previous_epoch: int | None
    scale_format: str
    kv_scales: dict[str, Any] | None
    kv_layers: dict[str, Any]
    kv_traffic: dict[str, Any]
    kv_cache_dtype: str
    staging: str
    stall_seconds: float | None
    paused_seconds: float | None = None
    draft_acceptance: dict[str, Any] | None = None
    compiled: list[dict[str, int]]
    twin_bytes: list[int]
    twin_kv_blocks: int
    last_update: dict[str, Any] | None
    totals: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Finishing:
    """Update of vLLM's weight transfer that is about to be committed; `kept`: names of tensors that did not come."""

    id: str
    kept: list[str]


@dataclass(frozen=True, kw_only=True)
class ServedScales(AnswerFields):
    """Scales of the KV cache: the fields of `serve.schema.KvScalesServed`."""

    policy: str
    source: str
    tokens: int
    epoch: int
    age: int
    granularity: str
    fit: dict[str, Any] | None
    traffic: dict[str, Any] | None
    rescaled: dict[str, int] | None
    scales: dict[str, dict[str, list[float]]]
    layers: dict[str, Any]
    traffic_layers: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ServedDigests(AnswerFields):
    """Digests of the served weights: the fields of `serve.schema.Digests`."""

    epoch: int
    version: str
    instance: str | None
    digests: dict[str, dict[str, str]]
    addresses: list[str]
    kv_scales: dict[str, dict[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class VerifiedWeights(AnswerFields):
    """Every rank serves what was committed: the fields of `serve.schema.Verified`."""

    epoch: int
    version: str
    instance: str | None
    ranks: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class RolledBack(AnswerFields):
    """The previous weights are served again: the fields of `serve.schema.Committed`."""

    epoch: int
    version: str
    instance: str | None
    seconds: dict[str, float]


Result: TypeAlias = (
    Done
    | EngineStatus
    | Failure
    | Finishing
    | JobStarted
    | Joined
    | Lifetime
    | Progress
    | RolledBack
    | ServedDigests
    | ServedManifest
    | ServedScales
    | Stale
    | UpdateState
    | VerifiedWeights
    | Waiting
)
KINDS: Mapping[str, type[Result]] = {kind.__name__: kind for kind in get_args(Result)}
"""Types of results by the name under which they cross the process boundary."""


def encode(result: Result, poisoned: str | None) -> dict[str, Any]:
    """Make a result plain, with the reason why the engine is `poisoned`, or None."""
    value = {each.name: getattr(result, each.name) for each in fields(result)}
    return {"kind": type(result).__name__, "value": value, "poisoned": poisoned}


def decode(reply: Mapping[str, Any]) -> tuple[Result, str | None]:
    """Return the result that `encode` made plain, and why the engine is poisoned."""
    return KINDS[reply["kind"]](**reply["value"]), reply["poisoned"]
