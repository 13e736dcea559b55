# SPDX-License-Identifier: Apache-2.0
"""The bodies of `/fp8ext/v1`. Imports neither vLLM nor torch."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from vllm_fp8ext.update.contract.fields import Body as Body
from vllm_fp8ext.update.contract.fields import Name, Path, Size, Version
from vllm_fp8ext.update.transports.dense_tensor import DenseTensor as DenseTensor
from vllm_fp8ext.update.transports.files.body import Files as Files
from vllm_fp8ext.update.transports.ipc.body import Allocation as Allocation
from vllm_fp8ext.update.transports.ipc.body import Handles as Handles
from vllm_fp8ext.update.transports.ipc.body import IpcTensor as IpcTensor
from vllm_fp8ext.update.transports.nccl.body import BroadcastGroup as BroadcastGroup
from vllm_fp8ext.update.transports.nccl.body import Receive as Receive

PREFIX = "/fp8ext/v1"
PROBLEM = "urn:fp8ext:problem:"
"""Prefix of every problem type (RFC 9457)."""

ExpertLayout = Literal["out_in", "in_out"]
Running = Literal["keep", "recompute", "wait", "abort"]
WaitSeconds = Annotated[float, Field(gt=0, le=3600)]
UpdateId = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$")]
Epoch = Annotated[int, Field(ge=0, le=2**53)]
Instance = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[0-9a-f]+$")]
Token = Annotated[int, Field(ge=0, le=2**31 - 1)]


class TensorClaim(Body):
    """A client's claim about one tensor; what it leaves out is not checked."""

    shape: Annotated[list[Size], Field(max_length=64)] | None = None
    dtype: str | None = Field(None, max_length=32, description="torch's name, such as `bfloat16`.")
    sha256: str | None = Field(
        None, pattern=r"^[0-9a-f]{64}$", description="Of the tensor's raw bytes; checked while it is staged."
    )


class Canary(Body):
    """Prompts on which the new weights are tried before they are served."""

    prompts: list[Annotated[list[Token], Field(min_length=2, max_length=4096)]] | None = Field(
        None,
        min_length=1,
        max_length=64,
        description="Token ids of each prompt; the server's own prompts when absent.",
    )
    max_perplexity: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Refuse weights whose perplexity over the prompts is above this.",
    )


Scale = Annotated[float, Field(gt=0, allow_inf_nan=False)]
HeadScales = Annotated[list[Scale], Field(min_length=1, max_length=4096)]


class LayerScales(Body):
    """Scales of one attention layer: a number, or one for each KV head."""

    k: Scale | HeadScales
    v: Scale | HeadScales
    q: Scale | HeadScales | None = Field(None, description="Stays as it is when absent.")


class KvScales(Body):
    """How the scales of the FP8 KV cache are found for the new weights; what is absent is as the server was started."""

    policy: Literal["calibrate", "history", "provided", "static"] | None = Field(
        None, description="`static`: the scales that are served stay."
    )
    prompts: list[Annotated[list[Token], Field(min_length=1)]] | None = Field(
        None, min_length=1, max_length=64, description="With `calibrate`: token ids to calibrate with."
    )
    scales: dict[Name, LayerScales] | None = Field(None, description="With `provided`: by attention layer.")
    cached: Literal["rescale", "recompute"] | None = Field(
        None, description="What becomes of K and V that running requests keep when scales change."
    )


class OpenUpdate(Body):
    """`POST /updates`."""

    id: UpdateId | None = Field(
        None, description="Chosen by the client, so that opening can be repeated safely."
    )
    version: Version | None = Field(
        None, description="The trainer's label; `epoch-N` when absent. May repeat."
    )
    base_epoch: Epoch | None = Field(None, description="Refuse unless this epoch is served.")
    instance: Instance | None = Field(
        None, description="Refuse unless the server is in this life, which `GET /weights` names."
    )
    partial: bool = Field(
        False,
        description="Parameters of which nothing is sent keep their served weights. Needs `base_epoch`.",
    )
    running: Running = Field("keep", description="What happens to running requests at the commit.")
    wait_seconds: WaitSeconds | None = Field(
        None, description="With `running` `wait`: longest time that the commit waits for running requests."
    )
    tensors: dict[Name, TensorClaim] | None = Field(
        None, description="What will be sent: shapes and dtypes are checked now, contents while staging."
    )
    expert_layout: ExpertLayout | None = Field(
        None,
        description="How fused experts lie: `out_in`, `[experts, out, in]`, which is taken, or `in_out`. Needed where their "
        "shape is the same both ways.",
    )
    canary: Canary | None = Field(None, description="Overrides the server's canary.")
    kv_scales: KvScales | None = Field(
        None, description="Overrides the server's policy for the FP8 KV cache."
    )


class Load(Body):
    """`POST /load`: open, files, prepare and commit in one call."""

    path: Path
    version: Version | None = None
    base_epoch: Epoch | None = None
    instance: Instance | None = None
    expert_layout: ExpertLayout | None = Field(None, description="As for `POST /updates`.")
    running: Running = "keep"
    wait_seconds: WaitSeconds | None = None
    canary: Canary | None = None
    kv_scales: KvScales | None = None


class Rollback(Body):
    """`POST /rollback`."""

    running: Running = "keep"
    wait_seconds: WaitSeconds | None = None


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


class Fit(BaseModel):
    """How well scales fitted K or V of the tokens that were looked at."""

    saturated_fraction: float = Field(description="Of the values, beyond the largest code.")
    relative_error: float = Field(description="‖x - dequantized‖ / ‖x‖.")
    headroom: float = Field(
        description="Powers of two from the largest value that was seen to the largest code."
    )


class WorstFit(Fit):
    """The worst of all layers."""

    worst: str = Field(description="The layer with the largest saturated fraction.")


class Traffic(BaseModel):
    """K or V that was written into the cache."""

    saturated_fraction: float = Field(description="Beyond the largest code.")
    headroom: float = Field(description="Powers of two from the largest value to the largest code.")


class WorstTraffic(Traffic):
    """The worst of all layers."""

    worst: str = Field(description="The layer with the largest saturated fraction.")


class Rescaled(BaseModel):
    """Cached codes that were rewritten at the last commit or rollback."""

    codes: int
    saturated: int = Field(description="Clamped to the largest code.")
    flushed: int = Field(description="Of other values than zero, now zero.")


class KvScalesSummary(BaseModel):
    """Scales of the FP8 KV cache, in short."""

    policy: Literal["calibrate", "history", "provided", "static"]
    source: str = Field(
        description="`update`, `settings`, `recent` or `built-in`: whose tokens they were calibrated with; else `history`, "
        "`trainer`, or `start` for those of the checkpoint or the setting `default`."
    )
    tokens: int = Field(description="How many of them were looked at.")
    epoch: int = Field(description="The weights that they were computed for.")
    age: int = Field(description="Epochs since then.")
    granularity: Literal["layer", "head"] | None = None
    fit: dict[str, WorstFit] | None = Field(description="Of `k` and `v`; null when nothing was looked at.")
    traffic: dict[str, WorstTraffic] | None = Field(
        None,
        description="With `history`, of `k` and `v` that were written before the last update with the scales of then.",
    )
    rescaled: Rescaled | None = Field(
        None, description="With running requests that kept their K and V, when scales changed."
    )


class KvScalesServed(KvScalesSummary):
    """`GET /weights/kv-scales`."""

    scales: dict[str, dict[str, list[float]]] = Field(description="By attention layer, of `q`, `k` and `v`.")
    layers: dict[str, dict[str, Fit]] = Field(description="By attention layer, of `k` and `v`.")
    traffic_layers: dict[str, dict[str, Traffic]] = Field(
        {}, description="`traffic` by attention layer, where something was written."
    )


class Update(BaseModel):
    """State of an update."""

    id: str
    state: Literal["open", "prepared", "committing", "committed", "abandoned", "expired"]
    version: str
    running: Running
    base_epoch: int | None
    partial: bool = False
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
        description="After the commit: `epoch`, `version`, `instance`, `pause_seconds`."
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


class Weights(BaseModel):
    """`GET /weights`: what is served."""

    epoch: int = Field(description="Raised by one at every commit and every rollback.")
    version: str
    instance: str | None = Field(
        None, description="Random for each life of the engine: epochs begin at 0 in each."
    )
    state: Literal["serving", "updating", "poisoned", "asleep"]
    poisoned: str | None
    update: str | None = Field(description="The open update.")
    previous_version: str | None = Field(
        description="What a rollback would serve; null when the twin no longer holds it."
    )
    previous_epoch: int | None
    scale_format: Literal["fp32", "pow2"]
    kv_scales: KvScalesSummary | None = Field(description="Null without an FP8 KV cache.")
    kv_cache_dtype: str
    staging: Literal["shadow", "inplace", "none"]
    twin_bytes: list[int] = Field(description="Memory of the twin, by rank.")
    stall_seconds: float | None = Field(
        None,
        description="From the pause for the last exchange to the end of the next engine step; null without requests.",
    )
    compiled: list[dict[str, int]] = Field(
        description="By rank, kernels and graphs compiled since its process began, by compiler, as of the last call to it."
    )
    twin_kv_blocks: int = Field(description="KV-cache blocks that the twin's memory would hold.")
    last_update: LastUpdate | None
    features: list[FeatureStatus] = Field(
        default=[], description="What serving can do without, and whether this server has it."
    )


class Sleep(Body):
    """`POST /sleep`: give the GPU's memory back, to a trainer on the same GPU, say."""

    level: Literal[1, 2] = Field(
        1,
        description="1: weights wait in host memory, the KV cache is discarded. 2: the weights are discarded too, and after "
        "waking nothing is served before a full update was committed.",
    )
    requests: Literal["abort", "wait", "keep"] = Field(
        "abort",
        description="Running requests end, are finished first, or go on after waking (their K and V computed again).",
    )


class Wake(Body):
    """`POST /wake`: take the memory again."""

    tags: list[Literal["weights", "kv_cache"]] | None = Field(
        None,
        description="Only these, so that an update can come before the KV cache takes its memory. By default all.",
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
