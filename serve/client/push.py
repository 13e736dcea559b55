# SPDX-License-Identifier: Apache-2.0
"""The flow that sends weights to one server and commits them."""

import contextlib
import math
import uuid
from collections.abc import Callable, Iterable, Mapping
from functools import partial as partial_of
from typing import Any, Literal, TypeAlias, get_args

import httpx

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve import schema
from vllm_fp8ext.serve.client import calls
from vllm_fp8ext.serve.client.flow import Endpoint, Flow, work
from vllm_fp8ext.serve.client.handles import batches, handles
from vllm_fp8ext.serve.client.progress import Counter, Progress
from vllm_fp8ext.serve.client.repeat import lost, unsent
from vllm_fp8ext.serve.client.source import Pushable, Source, source_of, tensors_of
from vllm_fp8ext.serve.safetensors_body import Body
from vllm_fp8ext.serve.tensors import TensorLike

CHUNK_BYTES = 256 << 20
"""Bytes of tensors in a chunk."""
IPC_CHUNK_BYTES = 4 << 30
"""The same for tensors that the server reads where they are and that are made one by one: so many are kept alive at once.
Those of a mapping are all there, and go as one chunk."""

Transport: TypeAlias = Literal["http", "ipc"]
"""`http`: as the bodies of requests. `ipc`: torch tensors on a GPU of the server's machine are read where they are."""


def push(
    endpoint: Endpoint,
    /,
    weights: Pushable,
    *,
    version: str | None = None,
    base_epoch: int | None = None,
    partial: bool = False,
    running: schema.Running = "keep",
    wait_seconds: float | None = None,
    canary: schema.Canary | None = None,
    transport: Transport = "http",
    chunk_bytes: int | None = None,
    checksum: bool = True,
    fp8: bool = False,
    id: str | None = None,
    progress: Progress | None = None,
    commit: bool = True,
) -> Flow[schema.Update]:
    """Send weights and commit them: a checkpoint's path, a mapping of names to tensors, or an iterable of such pairs.

    `partial`: what is not sent keeps its served weights; needs `base_epoch`, and of each parameter all of its tensors.
    `wait_seconds`: with `running="wait"`, how long the commit may wait for running requests. `chunk_bytes`: of tensors in
    one chunk (`CHUNK_BYTES` or `IPC_CHUNK_BYTES`); over HTTP tensors are copied to host memory a chunk at a time. `checksum`:
    the server checks a SHA-256 of each chunk that comes over HTTP.
    `fp8`: quantize here what the server takes quantized (needs torch), and send half the bytes.
    `id`: of an update that was interrupted, to go on with it; chunks of a checkpoint on disk that have been staged are not
    sent again.

    `commit`: without it the update is only prepared, for a `commit(id)` at a time of the caller's choice.

    A refused update is abandoned, and so is one that is given up on this side.

    Raises:
        ValueError: a checkpoint that can't be read, or a tensor that can't be sent.
        UpdateError: a refusal; or `interrupted`, with `details["id"]`: the connection was lost, and the update stays open.
        httpx.HTTPError: the server can't be reached; no update was opened.
    """

    def manifests() -> Flow[list[dict[str, Any]]]:
        return [(yield from calls.manifest(endpoint))]

    send: Callable[[schema.Update], Flow[None]]
    if transport == "ipc":
        tensors = yield from tensors_of(weights, manifests, fp8=fp8)
        limit = math.inf if isinstance(weights, Mapping) and not fp8 else IPC_CHUNK_BYTES
        send = partial_of(_hand_over, endpoint, tensors, chunk_bytes or limit, progress)
    elif transport == "http":
        source = yield from source_of(weights, manifests, fp8=fp8)
        send = partial_of(_send, endpoint, source, chunk_bytes or CHUNK_BYTES, checksum, progress)
    else:
        raise ValueError(f"transport: expected {' or '.join(get_args(Transport))}, found {transport!r}")
    id = id or uuid.uuid4().hex
    try:
        update = yield from calls.open(
            endpoint,
            version=version,
            base_epoch=base_epoch,
            partial=partial,
            running=running,
            wait_seconds=wait_seconds,
            canary=canary,
            id=id,
        )
    except (UpdateError, httpx.TransportError) as error:
        if lost(error) and not unsent(error):
            raise _interrupted(endpoint, id, error) from error
        raise
    if update.state == "committed":
        return update
    try:
        yield from send(update)
        if not commit:
            return (yield from calls.prepare(endpoint, id))
        return (yield from calls.commit(endpoint, id, wait_seconds=wait_seconds))
    except BaseException as error:
        if lost(error):
            raise _interrupted(endpoint, id, error) from error
        yield from abandon_quietly(endpoint, id)
        raise


def _send(
    endpoint: Endpoint,
    source: Source,
    chunk_bytes: int,
    checksum: bool,
    progress: Progress | None,
    update: schema.Update,
) -> Flow[None]:
    limit = chunk_limit([update], chunk_bytes)
    counter = Counter(progress, source.total(limit))
    for n, body in enumerate(source.chunks(limit)):
        if not (source.files and is_staged(update, n, body)):
            body, sha256 = yield from ready(body, checksum)
            yield from calls.put_chunk(
                endpoint, update.id, n, body, sha256=sha256, sent=counter.of(endpoint.url)
            )
        counter.end_chunk(body.length)


def _hand_over(
    endpoint: Endpoint,
    tensors: Iterable[tuple[str, TensorLike]],
    limit: float,
    progress: Progress | None,
    update: schema.Update,
) -> Flow[None]:
    counter = Counter(progress, None)
    for n, group in enumerate(batches(tensors, limit)):
        body = yield from work(partial_of(handles, group, n))
        yield from calls.handles(endpoint, update.id, body)
        counter.end_chunk(sum(tensor.nbytes for _, tensor in group))


def chunk_limit(updates: list[schema.Update], chunk_bytes: int) -> int:
    """Bytes of tensors in a chunk, such that two fit into each server's room for waiting chunks."""
    rooms = [update.max_chunk_bytes for update in updates if update.max_chunk_bytes]
    return min([chunk_bytes, *(room // 2 for room in rooms)])


def is_staged(update: schema.Update, n: int, body: Body) -> bool:
    """Whether the server had staged a chunk of this number and length when the update was opened again."""
    known = update.chunks.get(str(n))
    return known is not None and known.staged and known.bytes == body.length


def ready(body: Body, checksum: bool) -> Flow[tuple[Body, bytes | None]]:
    """The body where it can be read again and again, and its SHA-256."""

    def make() -> tuple[Body, bytes | None]:
        fetched = body.fetched()
        return fetched, fetched.sha256() if checksum else None

    return work(make)


def abandon_quietly(endpoint: Endpoint, id: str) -> Flow[None]:
    """Give an update up after an error. That error is the one to report, whatever comes of this."""
    with contextlib.suppress(UpdateError, httpx.HTTPError):
        yield from calls.abandon(endpoint, id)


def _interrupted(endpoint: Endpoint, id: str, error: BaseException) -> UpdateError:
    message = (
        f"{endpoint.url}: the connection was lost ({error or type(error).__name__}). Update {id} may still be open: "
        f"push the same weights with id={id!r} (fp8ext push --resume {id}) to go on, or abandon it"
    )
    return UpdateError("interrupted", message, status=503, id=id)
