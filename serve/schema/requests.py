# SPDX-License-Identifier: Apache-2.0
"""Bodies of requests to `/fp8ext/v1`; those of transports are in their folders."""

from typing import Annotated, Literal

from pydantic import Field

from vllm_fp8ext.update.contract.fields import Body, Name, Path, Size, Version

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
    sparse: bool = Field(
        False,
        description="As `partial`, and slices change what they hold alone: the rest of their tensors stays, too.",
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
    becomes_current: bool = Field(
        True,
        description="With false, a server that answers no requests, since it is not current, goes on so after the "
        "commit, until `POST /weights/current`.",
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


class Current(Body):
    """`POST /weights/current`: what is loaded is what the other servers serve."""

    epoch: Epoch = Field(description="Epoch of this server that was looked at; refuse unless it is served.")
    version: Version | None = Field(None, description="Label of these weights there; as it is when absent.")
    instance: Instance | None = Field(None, description="Refuse unless the server is in this life.")


class Rollback(Body):
    """`POST /rollback`."""

    running: Running = "keep"
    wait_seconds: WaitSeconds | None = None


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
