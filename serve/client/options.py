# SPDX-License-Identifier: Apache-2.0
"""The options of a push: one definition for `Client`, `AsyncClient`, `Replicas`, `AsyncReplicas` and the embedded engine."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Concatenate, Literal, ParamSpec, TypeAlias, TypeVar

from vllm_fp8ext.serve import schema
from vllm_fp8ext.serve.client.bodies import body_of
from vllm_fp8ext.serve.client.flow import Flow
from vllm_fp8ext.serve.client.progress import Progress
from vllm_fp8ext.serve.client.source import Pushable
from vllm_fp8ext.serve.client.transports.nccl.group import Group
from vllm_fp8ext.serve.client.transports.registry import SENDERS

Transport: TypeAlias = Literal["http", "ipc", "nccl", "files"]
"""`http`: as the bodies of requests. `ipc`: torch tensors on a GPU of the server's machine are read where they are. `nccl`:
torch tensors on another GPU, or on the CPU, are broadcast to the ranks. `files`: the server reads a checkpoint on its
disk."""

CHUNKS_IN_FLIGHT = 8
"""Chunks under way at the same time. A thread computes a SHA-256 at less than half the speed of a connection within one
machine, before a chunk is sent and again where it arrives; then the chunk is staged. With eight, it is the connection that is
waited for."""


@dataclass(frozen=True, kw_only=True)
class PushOptions:
    """How weights are pushed, to one server or to several.

    Raises:
        ValueError: a value that is none of those that it may have.
    """

    version: str | int | None = None
    """Label of the weights (the training step, say); a number becomes its digits. May repeat."""
    base_epoch: int | None = None
    """Refuse unless this epoch is served."""
    partial: bool = False
    """Served weights stay where nothing is sent. Needs `base_epoch`, and of each parameter all of its tensors."""
    sparse: bool = False
    """As `partial`, and slices change what they hold alone: the rest of their tensors stays, too."""
    running: schema.Running = "keep"
    """Treatment of running requests: `keep`, `recompute`, `wait` or `abort`."""
    wait_seconds: float | None = None
    """With `running="wait"`: longest time, in seconds, that the commit waits for running requests."""
    canary: schema.Canary | None = None
    """Prompts on which the new weights are tried before they are served; by default the server's."""
    kv_scales: schema.KvScales | None = None
    """Policy for the scales of an FP8 KV cache; by default as the server was started."""
    expert_layout: schema.ExpertLayout | None = None
    """Layout of fused experts, needed where their shape is the same both ways. Servers take `out_in`, `[experts, out, in]`,
    as transformers holds nearly all."""
    becomes_current: bool = True
    """With false, a server that is not current stays so after the commit, until `declare_current`."""
    transport: Transport = "http"
    """How the tensors reach the server."""
    group: Group | None = None
    """With `nccl`: what tensors are broadcast through, kept between pushes by the caller; by default one is made for each."""
    chunk_bytes: int | None = None
    """Bytes of tensors in one chunk (`CHUNK_BYTES`, `IPC_CHUNK_BYTES` or `BUCKET_BYTES`); a larger tensor travels alone."""
    chunks_in_flight: int = CHUNKS_IN_FLIGHT
    """Chunks that are under way at the same time over HTTP, at most. Each is copied to host memory, hashed, sent and
    staged."""
    checksum: bool = True
    """The server checks a SHA-256 of each chunk that comes over HTTP."""
    fp8: bool = False
    """Quantize here what the server takes quantized (needs torch), and send half the bytes."""
    id: str | None = None
    """Id of an update that was interrupted, to go on with it. Over HTTP, chunks that have been staged with the same SHA-256
    are not sent again."""
    progress: Progress | None = None
    """Called with the bytes sent and the bytes in all, in whatever thread sends."""

    several_servers: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in ("chunk_bytes", "chunks_in_flight"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: expected at least 1, found {value}")
        names = [
            name for name, sender in SENDERS.items() if sender.several_servers or not self.several_servers
        ]
        if self.transport not in names:
            raise ValueError(f"transport: expected {', '.join(names)}, found {self.transport!r}")
        body_of(schema.OpenUpdate, **self.opening(), id=self.id)

    def opening(self) -> dict[str, Any]:
        """Return the fields of `schema.OpenUpdate` that the options say."""
        return {
            "version": None if self.version is None else str(self.version),
            "base_epoch": self.base_epoch,
            "partial": self.partial,
            "sparse": self.sparse,
            "running": self.running,
            "wait_seconds": self.wait_seconds,
            "canary": self.canary,
            "kv_scales": self.kv_scales,
            "expert_layout": self.expert_layout,
            "becomes_current": self.becomes_current,
        }


@dataclass(frozen=True, kw_only=True)
class ClientPushOptions(PushOptions):
    """How weights are pushed to one server."""

    instance: str | None = None
    """Life of the server that this is for, as `weights` tells it; one that was started anew refuses."""
    commit: bool = True
    """Serve the weights. Otherwise the update is only prepared, for a `commit(id)` at a time of the caller's choice."""


@dataclass(frozen=True, kw_only=True)
class ReplicasPushOptions(PushOptions):
    """How weights are pushed to several servers."""

    instances: Mapping[str, str] | None = None
    """Life of each server that this is for, by its URL."""

    several_servers: ClassVar[bool] = True


S = TypeVar("S")
T = TypeVar("T")
Options = TypeVar("Options", bound=PushOptions)
P = ParamSpec("P")


def by_keywords(
    push: Callable[[S, Pushable, Options], Flow[T]], options: Callable[P, Options]
) -> Callable[Concatenate[S, Pushable, P], Flow[T]]:
    """Return a push that takes the fields of `options`, a dataclass, as its keywords."""

    @functools.wraps(push)
    def with_keywords(subject: S, weights: Pushable, /, *args: P.args, **keywords: P.kwargs) -> Flow[T]:
        return push(subject, weights, options(*args, **keywords))

    positional = list(inspect.signature(push).parameters.values())[:2]
    keyword = inspect.signature(options).parameters.values()
    signature = inspect.signature(push).replace(parameters=[*positional, *keyword])
    with_keywords.__signature__ = signature  # type: ignore[attr-defined]  # of functions alike
    return with_keywords
