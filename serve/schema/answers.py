# SPDX-License-Identifier: Apache-2.0
"""Bodies of answers of `/fp8ext/v1`."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from vllm_fp8ext.serve.schema.kv_scales import KvScalesSummary
from vllm_fp8ext.serve.schema.requests import Running


class ChunkState(BaseModel):
    """One chunk of an update."""

    staged: bool
    busy: bool = Field(
        False, description="Still to be staged. A chunk that is neither staged nor busy was refused."
    )
    bytes: int
    tensors: int
    sha256: str | None = Field(
        None, description="Of its body, in hexadecimal, where the client sent a `Content-Digest`."
    )


class QuantizationError(BaseModel):
    """‖w - dequantized‖ / ‖w‖ of the quantized weights."""

    relative: float = Field(description="Over all of them together.")
    mean: float = Field(description="Mean over tensors.")
    max: float = Field(description="Largest of any tensor.")
    worst: str = Field(description="The tensor that has it.")


class Update(BaseModel):
    """State of an update."""

    id: str
    state: Literal["open", "prepared", "committing", "committed", "abandoned", "expired"]
    version: str
    running: Running
    base_epoch: int | None
    partial: bool = False
    sparse: bool = False
    world_size: int = Field(1, description="Ranks of the server.")
    opened_at: float = Field(description="Unix time, seconds.")
    expires_at: float | None = Field(
        None, description="Unix time, seconds, at which it ends if nothing happens to it; null after its end."
    )
    tensors_required: int
    tensors_missing: int
    missing: list[str] = Field(
        description="Required tensors that have not been staged: the first 100 by name (`incomplete` tells all)."
    )
    bytes: int = Field(description="Bytes of the staged chunks.")
    chunks: dict[str, ChunkState]
    problems: list[dict[str, Any]] = Field(description="What was wrong with refused chunks: the first 100.")
    problem_count: int = Field(0, description="How many problems refused chunks had.")
    seconds: dict[str, float] = Field(
        description="`staging`, `prepare` (in it `kv_scales` and `fingerprint`), `drain`, `exchange`, `caches`, `pause`, "
        "`verify`, `waiting` (between these) and `total`, as far as they happened."
    )
    quantization_error: QuantizationError | None
    canary_perplexity: float | None = Field(
        None, description="Perplexity over the canary's prompts, once prepared."
    )
    kv_scales: KvScalesSummary | None = Field(None, description="Of its FP8 KV cache, once prepared.")
    max_chunk_bytes: int | None = Field(None, description="Largest body of one chunk; told on opening.")
    max_receive_bytes: int | None = Field(None, description="Largest bucket of a broadcast; told on opening.")
    group: str | None = Field(
        None, description="Id of the group of broadcasts that its ranks were told of last; told on opening."
    )
    result: dict[str, Any] | None = Field(
        description="After the commit: `epoch`, `version`, `instance`, `pause_seconds`, and `served_at`: Unix time, seconds, "
        "from which on the engine could step with the new weights."
    )


class LastUpdate(BaseModel):
    """Summary of the last committed update."""

    id: str
    bytes: int
    seconds: dict[str, float]
    quantization_error: QuantizationError | None


class FeatureStatus(BaseModel):
    """One thing that serving can do without, such as a way to make steps faster."""

    name: str
    on: bool = Field(description="Installed in this server. Which layers and steps it takes, the log says.")
    reason: str | None = Field(
        description="Why it is off: a name that this vLLM lacks, a setting, the machine, or another feature."
    )


class EpochDrafts(BaseModel):
    """Drafts of speculative decoding that the weights of one epoch checked."""

    epoch: int
    drafts: int = Field(description="One for each request and step that had a draft.")
    draft_tokens: int
    accepted_tokens: int


class DraftAcceptance(BaseModel):
    """Drafts of speculative decoding, by epoch."""

    served: EpochDrafts
    previous: EpochDrafts | None = Field(description="Of the epoch before; null until there was one.")


class Weights(BaseModel):
    """`GET /weights`: what is served."""

    epoch: int = Field(description="Raised by one at every commit and every rollback.")
    version: str
    instance: str | None = Field(
        None, description="Random for each life of the engine: epochs begin at 0 in each."
    )
    state: Literal["serving", "updating", "poisoned", "no-weights", "not-current", "asleep"]
    poisoned: str | None
    update: str | None = Field(description="The open update.")
    previous_version: str | None = Field(
        description="What a rollback would serve; null when the shadow no longer holds it."
    )
    previous_epoch: int | None
    scale_format: Literal["fp32", "pow2"]
    kv_scales: KvScalesSummary | None = Field(description="Null without an FP8 KV cache.")
    kv_cache_dtype: str
    staging: Literal["shadow", "inplace", "none"]
    twin_bytes: list[int] = Field(description="Memory of the shadow, by rank.")
    stall_seconds: float | None = Field(
        None,
        description="From the pause for the last exchange to the end of the next engine step; null without requests.",
    )
    paused_seconds: float | None = Field(
        None, description="How long somebody has paused generation; null while it goes on."
    )
    draft_acceptance: DraftAcceptance | None = Field(
        None, description="How many drafts the weights accept; null without speculative decoding."
    )
    compiled: list[dict[str, int]] = Field(
        description="By rank, kernels and graphs compiled since its process began, by compiler, as of the last call to it."
    )
    twin_kv_blocks: int = Field(description="KV-cache blocks that the shadow's memory would hold.")
    last_update: LastUpdate | None
    features: list[FeatureStatus] = Field(
        default=[], description="What serving can do without, and whether this server has it."
    )


class Committed(BaseModel):
    """`POST /rollback`: what is served now."""

    epoch: int
    version: str
    instance: str | None = None
    seconds: dict[str, float]


class Digests(BaseModel):
    """`GET /weights/digests`."""

    epoch: int
    version: str
    instance: str | None = None
    digests: dict[str, dict[str, str]] = Field(description="SHA-256 by checkpoint tensor, then by rank.")
    addresses: list[str] = Field(
        description="By rank, a SHA-256 over the storage addresses of the served weights."
    )
    kv_scales: dict[str, dict[str, str]] = Field(
        default={},
        description="Of the FP8 KV cache: SHA-256 by attention layer, of the scales of `q`, `k` and `v`.",
    )


class Verified(BaseModel):
    """`POST /weights/verify`: every rank serves what was committed."""

    epoch: int
    version: str
    instance: str | None = None
    ranks: int
    seconds: float


class Problem(BaseModel):
    """RFC 9457 problem document. Members beyond these depend on the type."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    detail: str
