# SPDX-License-Identifier: Apache-2.0
"""Chunks of a push on their way to the servers, several at once."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from vllm_fp8ext.serve import schema
from vllm_fp8ext.serve.client import calls
from vllm_fp8ext.serve.client.everywhere import Everywhere
from vllm_fp8ext.serve.client.flow import Endpoint, Flow, Work, pipelined, work
from vllm_fp8ext.serve.client.progress import Counter
from vllm_fp8ext.serve.client.resumed import require_no_others, require_same, staged_digest
from vllm_fp8ext.serve.client.source import ChunkSource
from vllm_fp8ext.serve.safetensors_body import SafetensorsBody

if TYPE_CHECKING:
    from vllm_fp8ext.serve.client.options import PushOptions

CHUNK_BYTES = 128 << 20
"""Bytes of tensors in a chunk."""


@dataclass(frozen=True)
class Numbering:
    """Numbers of one sender's chunks: of `parts` senders it is number `part`, from 0."""

    part: int = 0
    parts: int = 1

    def of(self, n: int) -> int:
        """Return the number of this sender's chunk `n`."""
        return self.part + n * self.parts


def send_chunks(
    updates: Mapping[Endpoint, schema.Update],
    source: ChunkSource,
    options: "PushOptions",
    everywhere: Everywhere,
    served: Sequence[schema.Update] = (),
    numbering: Numbering = Numbering(),  # it is frozen
) -> Flow[None]:
    """Send every chunk to all servers. Those that a server has staged with the same digest are left out. `served`: the same
    update on servers that have committed it, by which chunks are the same as they were. `numbering`: of senders that send a
    part each.

    The source is advanced when a chunk may begin; where all of it is known, a tensor that travels alone goes first, since it
    takes longest. The first failure ends it all: no further chunk is begun, and those under way end, or break off, before it
    is raised. Where nothing is to be sent, only a source that is known is compared with what was committed.

    Raises:
        UpdateError: `other-update`: an update has, or has committed, other weights; `file-changed`.
    """
    if not updates and not source.whole:
        return
    limit = _limit((*updates.values(), *served), options)
    total = source.total(limit)
    counter = Counter(options.progress, None if total is None else total * len(updates))
    numbers: set[int] = set()

    def chunk(n: int, body: SafetensorsBody) -> Flow[None]:
        n = numbering.of(n)
        numbers.add(n)
        size = body.length * len(updates)
        before = {endpoint: staged_digest(update, n, body.length) for endpoint, update in updates.items()}
        committed = [staged_digest(update, n, body.length) for update in served]
        hashed = options.checksum or any(before.values()) or any(committed)
        body, sha256 = yield from work(partial(_ready, body, hashed))
        require_same(served, committed, sha256)
        lacking = [
            endpoint for endpoint, digest in before.items() if sha256 is None or digest != sha256.hex()
        ]
        if lacking:

            def put(endpoint: Endpoint) -> Flow[schema.Update]:
                id, sent = updates[endpoint].id, counter.of(n, endpoint.url)
                checked_sha256 = sha256 if options.checksum else None
                return calls.put_chunk(endpoint, id, n, body, sha256=checked_sha256, sent=sent)

            yield from everywhere(lacking, put)
        counter.end_chunk(n, size)

    yield from pipelined(_flows(source, limit, chunk), options.chunks_in_flight)
    yield from work(source.confirm)
    if numbering.parts == 1:
        require_no_others(updates.values(), len(numbers))


def _flows(
    source: ChunkSource, limit: int, chunk: Callable[[int, SafetensorsBody], Flow[None]]
) -> Iterator[Flow[None] | Work]:
    """A flow for each chunk, and the work between them."""
    if source.whole:
        for n, body in sorted(
            enumerate(source.bodies(limit)), key=lambda numbered: numbered[1].size <= limit
        ):
            yield chunk(n, body)
        return
    n = 0
    for body_or_work in source.chunks(limit):
        if isinstance(body_or_work, Work):
            yield body_or_work
        else:
            yield chunk(n, body_or_work)
            n += 1


def _limit(updates: Iterable[schema.Update], options: "PushOptions") -> int:
    """Return the bytes of tensors in a chunk. Those under way and one more, for headers and gaps, fit into each server's room
    for waiting chunks."""
    rooms = [update.max_chunk_bytes for update in updates if update.max_chunk_bytes]
    limit = CHUNK_BYTES if options.chunk_bytes is None else options.chunk_bytes
    return min([limit, *(room // (options.chunks_in_flight + 1) for room in rooms)])


def _ready(body: SafetensorsBody, hashed: bool) -> tuple[SafetensorsBody, bytes | None]:
    """Return a body that can be read again and again, and its SHA-256. There is none unless it is to be `hashed`."""
    fetched = body.fetched()
    return fetched, fetched.sha256() if hashed else None
