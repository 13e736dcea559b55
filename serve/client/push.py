# SPDX-License-Identifier: Apache-2.0
"""The flow that sends weights to one server and commits them."""

import contextlib
import math
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial as partial_of
from typing import Any, Literal, TypeAlias, get_args

import httpx

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve import schema
from vllm_fp8ext.serve.client import calls
from vllm_fp8ext.serve.client.flow import Endpoint, Flow, work
from vllm_fp8ext.serve.client.lent import end
from vllm_fp8ext.serve.client.progress import Counter, Progress
from vllm_fp8ext.serve.client.repeat import lost_by, undecided, unsent
from vllm_fp8ext.serve.client.resumed import require_no_others
from vllm_fp8ext.serve.client.source import Pushable, Source, Tensors, source_of, tensors_of
from vllm_fp8ext.serve.client.transports.http.chunks import CHUNKS_IN_FLIGHT, Sending, alone, send_chunks
from vllm_fp8ext.serve.client.transports.ipc.handles import batches, handles
from vllm_fp8ext.serve.client.transports.nccl.broadcast import BUCKET_BYTES, broadcast
from vllm_fp8ext.serve.client.transports.nccl.group import Group

IPC_CHUNK_BYTES = 4 << 30
"""Bytes of tensors in a chunk that the server reads where they are, when they are made one by one: so many of them, or
of copies of them, are there at once. Those of a `dict` are all there, and go as one chunk."""

ABANDON_SECONDS = 10.0
"""Longest time without an answer when an update is given up after an error."""

Transport: TypeAlias = Literal["http", "ipc", "nccl"]
"""`http`: as the bodies of requests. `ipc`: torch tensors on a GPU of the server's machine are read where they are. `nccl`:
torch tensors on another GPU, or on the CPU, are broadcast to the server's ranks."""


def push(
    endpoint: Endpoint,
    /,
    weights: Pushable,
    *,
    version: str | int | None = None,
    base_epoch: int | None = None,
    instance: str | None = None,
    partial: bool = False,
    running: schema.Running = "keep",
    wait_seconds: float | None = None,
    canary: schema.Canary | None = None,
    kv_scales: schema.KvScales | None = None,
    expert_layout: schema.ExpertLayout | None = None,
    transport: Transport = "http",
    group: Group | None = None,
    chunk_bytes: int | None = None,
    chunks_in_flight: int = CHUNKS_IN_FLIGHT,
    checksum: bool = True,
    fp8: bool = False,
    id: str | None = None,
    progress: Progress | None = None,
    commit: bool = True,
) -> Flow[schema.Update]:
    """Send weights and commit them: a checkpoint's path, a mapping of names to tensors, or an iterable of such pairs.

    Tensors of a `dict` stay as they are until this returns. What any other iterable yields is copied before it is asked for
    more (on a GPU on the current stream), so that it may change the tensor then.

    `version`: the label; a number becomes its digits. `instance`: the life of the server that this is for, as `weights`
    tells it; one that was started anew refuses. `partial`: what is not sent keeps its served weights; needs
    `base_epoch`, and of each parameter all of its tensors. `wait_seconds`: with `running="wait"`, how long the commit may
    wait for running requests. `expert_layout`: how fused experts lie, which must be said where their shape is the same both
    ways; servers take `out_in`, `[experts, out, in]`, as transformers holds nearly all. `chunk_bytes`: of tensors in one
    chunk (`CHUNK_BYTES`, `IPC_CHUNK_BYTES` or `BUCKET_BYTES`).
    `chunks_in_flight`: how many are under way at the same time over HTTP; tensors are copied to host memory for it.
    `checksum`: the server checks a SHA-256 of each chunk that comes over HTTP. `group`: what `nccl` broadcasts through, kept
    between pushes by the caller; without it one is made for each. `fp8`: quantize here what the server takes quantized (needs
    torch), and send half the bytes. `id`: of an update that was interrupted, to go on with it; over HTTP, chunks that have
    been staged with the same SHA-256 are not sent again.

    `commit`: without it the update is only prepared, for a `commit(id)` at a time of the caller's choice.

    `progress` is called in whatever thread sends. A refused update is abandoned, and so is one that is given up on this side;
    no chunk is under way any more when this raises.

    Raises:
        ValueError: a checkpoint that can't be read, a tensor that can't be sent, or a number that is none.
        UpdateError: a refusal; or `interrupted`, with `details["id"]`: an answer was lost, and the update stays open, or is
            committed.
        httpx.HTTPError: the server can't be reached; no update was opened.
    """
    sending = Sending(
        chunk_bytes=chunk_bytes, in_flight=chunks_in_flight, checksum=checksum, progress=progress
    )

    def manifests() -> Flow[list[dict[str, Any]]]:
        return [(yield from calls.manifest(endpoint))]

    send: Callable[[schema.Update], Flow[None]]
    compare: Callable[[schema.Update], Flow[None]] | None = None
    if transport == "ipc":
        tensors = yield from tensors_of(weights, manifests, fp8=fp8)
        limit = math.inf if tensors.complete else IPC_CHUNK_BYTES
        send = partial_of(_hand_over, endpoint, tensors, chunk_bytes or limit, progress)
    elif transport == "nccl":
        tensors = yield from tensors_of(weights, manifests, fp8=fp8)

        def send(update: schema.Update) -> Flow[None]:
            return broadcast(
                {endpoint: update}, tensors.pairs, chunk_bytes or BUCKET_BYTES, group, progress, alone
            )

    elif transport == "http":
        source = yield from source_of(weights, manifests, fp8=fp8)
        send = partial_of(_send, endpoint, source, sending)
        compare = partial_of(_compare, source, sending)
    else:
        raise ValueError(f"transport: expected {', '.join(get_args(Transport))}, found {transport!r}")
    id = id or uuid.uuid4().hex
    patience = calls.patience(running, wait_seconds)
    try:
        update = yield from calls.open(
            endpoint,
            version=version,
            base_epoch=base_epoch,
            instance=instance,
            partial=partial,
            running=running,
            wait_seconds=wait_seconds,
            canary=canary,
            kv_scales=kv_scales,
            expert_layout=expert_layout,
            id=id,
        )
    except (UpdateError, httpx.TransportError) as error:
        if lost_by(endpoint, error) and not unsent(error):
            raise _interrupted(endpoint, id, error) from error
        raise
    except (Exception, GeneratorExit):
        raise
    except BaseException:  # given up: it may have been opened all the same
        yield from abandon_quietly(endpoint, id)
        raise
    if update.state == "committed":
        if compare:
            yield from compare(update)
        return update
    committing = False
    try:
        yield from send(update)
        if not commit:
            return (yield from calls.prepare(endpoint, id))
        committing = True
        return (yield from calls.commit(endpoint, id, wait_seconds=patience))
    except BaseException as error:
        end(weights)
        if lost_by(endpoint, error) or (committing and undecided(error)):
            raise _interrupted(endpoint, id, error) from error
        yield from abandon_quietly(endpoint, id)
        raise


def _send(endpoint: Endpoint, source: Source, sending: Sending, update: schema.Update) -> Flow[None]:
    return send_chunks({endpoint: update}, source, sending, alone)


def _compare(source: Source, sending: Sending, committed: schema.Update) -> Flow[None]:
    return send_chunks({}, source, sending, alone, (committed,))


def _hand_over(
    endpoint: Endpoint,
    tensors: Tensors,
    limit: float,
    progress: Progress | None,
    update: schema.Update,
) -> Flow[None]:
    counter, count = Counter(progress, None), 0
    for group in batches(tensors.pairs, limit, tensors.lent):
        body = yield from work(partial_of(handles, group, count))
        yield from calls.handles(endpoint, update.id, body)
        counter.end_chunk(count, sum(tensor.nbytes for _, tensor in group))
        group.clear()  # else they are there until the next group is complete
        count += 1
    require_no_others((update,), count)


def abandon_quietly(endpoint: Endpoint, id: str) -> Flow[None]:
    """Give an update up after an error. That error is the one to report, whatever comes of this, and nobody waits long for a
    server that does not answer."""
    briefly = replace(
        endpoint, timeout=min(endpoint.timeout, ABANDON_SECONDS), retries=min(endpoint.retries, 1)
    )
    with contextlib.suppress(UpdateError, httpx.HTTPError):
        yield from calls.abandon(briefly, id)


def _interrupted(endpoint: Endpoint, id: str, error: BaseException) -> UpdateError:
    message = (
        f"{endpoint.url}: no answer ({error or type(error).__name__}). Update {id} may still be open: "
        f"push the same weights with id={id!r} (fp8ext push --resume {id}) to go on, or abandon it"
    )
    return UpdateError("interrupted", message, status=503, id=id)
