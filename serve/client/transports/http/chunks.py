# SPDX-License-Identifier: Apache-2.0
"""The chunks of a push on their way to the servers, several at the same time."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

from vllm_fp8ext.serve import schema
from vllm_fp8ext.serve.client import calls
from vllm_fp8ext.serve.client.flow import Endpoint, Flow, Work, pipelined, work
from vllm_fp8ext.serve.client.progress import Counter, Progress
from vllm_fp8ext.serve.client.resumed import require_no_others, require_same, staged_digest
from vllm_fp8ext.serve.client.source import Source
from vllm_fp8ext.serve.safetensors_body import Body

T = TypeVar("T")

CHUNK_BYTES = 128 << 20
"""Bytes of tensors in a chunk."""
CHUNKS_IN_FLIGHT = 8
"""Chunks under way at the same time. A thread computes a SHA-256 at less than half the speed of a connection within one
machine, before a chunk is sent and again where it arrives; then the chunk is staged. With eight, it is the connection that is
waited for."""

Everywhere: TypeAlias = Callable[[list[Endpoint], Callable[[Endpoint], Flow[Any]]], Flow[dict[str, Any]]]
"""Runs a flow on each of some servers, and returns what each returned, by URL; fails when it fails on one."""


def alone(endpoints: list[Endpoint], flow: Callable[[Endpoint], Flow[T]]) -> Flow[dict[str, T]]:
    """`Everywhere` where there is one server: its errors are raised as they are."""
    [endpoint] = endpoints
    return {endpoint.url: (yield from flow(endpoint))}


@dataclass(frozen=True, kw_only=True)
class Sending:
    """How chunks are sent.

    Raises:
        ValueError: a number below 1.
    """

    chunk_bytes: int | None
    """Of tensors in a chunk, at most (`CHUNK_BYTES`); a larger tensor travels alone."""
    in_flight: int
    """Chunks that are copied to host memory, hashed, sent or staged at the same time, at most."""
    checksum: bool
    """Whether the servers check a SHA-256 of each."""
    progress: Progress | None

    def __post_init__(self) -> None:
        for name, value in (("chunk_bytes", self.chunk_bytes), ("chunks_in_flight", self.in_flight)):
            if value is not None and value < 1:
                raise ValueError(f"{name}: expected at least 1, found {value}")


def send_chunks(
    updates: Mapping[Endpoint, schema.Update],
    source: Source,
    how: Sending,
    everywhere: Everywhere,
    beside: Sequence[schema.Update] = (),
) -> Flow[None]:
    """Send every chunk to all servers, but for those that a server has staged with the same digest. `beside`: the same update
    on servers that have committed it, by which chunks are the same as they were.

    The source is advanced when a chunk may begin; where all of it is known, a tensor that travels alone goes first, since it
    takes longest. The first failure ends it all: no further chunk is begun, and those under way end, or break off, before it
    is raised. Where nothing is to be sent, only a source that is known is compared with what was committed.

    Raises:
        UpdateError: `other-update`: an update has, or has committed, other weights; `file-changed`.
    """
    if not updates and not source.whole:
        return
    limit = _limit((*updates.values(), *beside), how)
    total = source.total(limit)
    counter = Counter(how.progress, None if total is None else total * len(updates))
    numbers: set[int] = set()

    def chunk(n: int, body: Body) -> Flow[None]:
        numbers.add(n)
        size = body.length * len(updates)
        before = {endpoint: staged_digest(update, n, body.length) for endpoint, update in updates.items()}
        committed = [staged_digest(update, n, body.length) for update in beside]
        hashed = how.checksum or any(before.values()) or any(committed)
        body, sha256 = yield from work(partial(_ready, body, hashed))
        require_same(beside, committed, sha256)
        lacking = [endpoint for endpoint, found in before.items() if sha256 is None or found != sha256.hex()]
        if lacking:

            def put(endpoint: Endpoint) -> Flow[schema.Update]:
                id, sent = updates[endpoint].id, counter.of(n, endpoint.url)
                told = sha256 if how.checksum else None
                return calls.put_chunk(endpoint, id, n, body, sha256=told, sent=sent)

            yield from everywhere(lacking, put)
        counter.end_chunk(n, size)

    yield from pipelined(_flows(source, limit, chunk), how.in_flight)
    yield from work(source.confirm)
    require_no_others(updates.values(), len(numbers))


def _flows(
    source: Source, limit: int, chunk: Callable[[int, Body], Flow[None]]
) -> Iterator[Flow[None] | Work]:
    """A flow for each chunk, and the work between them."""
    if source.whole:
        for n, body in sorted(
            enumerate(source.bodies(limit)), key=lambda numbered: numbered[1].size <= limit
        ):
            yield chunk(n, body)
        return
    n = 0
    for found in source.chunks(limit):
        if isinstance(found, Work):
            yield found
        else:
            yield chunk(n, found)
            n += 1


def _limit(updates: Iterable[schema.Update], how: Sending) -> int:
    """Bytes of tensors in a chunk, such that those under way and one more, for headers and gaps, fit into each server's room
    for waiting chunks."""
    rooms = [update.max_chunk_bytes for update in updates if update.max_chunk_bytes]
    asked = CHUNK_BYTES if how.chunk_bytes is None else how.chunk_bytes
    return min([asked, *(room // (how.in_flight + 1) for room in rooms)])


def _ready(body: Body, hashed: bool) -> tuple[Body, bytes | None]:
    """The body where it can be read again and again, and its SHA-256 if it is to be hashed."""
    fetched = body.fetched()
    return fetched, fetched.sha256() if hashed else None
