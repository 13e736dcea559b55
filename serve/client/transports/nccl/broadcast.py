# SPDX-License-Identifier: Apache-2.0
"""The flow that broadcasts tensors to all ranks of one server or several.

While a bucket is broadcast the next one is packed and told to the servers: its ranks begin to wait for it once they have
staged the one before. So a rank waits, on its GPU, only for what is there to be sent.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve import schema
from vllm_fp8ext.serve.client import calls
from vllm_fp8ext.serve.client.everywhere import Everywhere
from vllm_fp8ext.serve.client.flow import Endpoint, Flow, Wait, work
from vllm_fp8ext.serve.client.progress import Counter, Progress
from vllm_fp8ext.serve.client.resumed import require_no_others
from vllm_fp8ext.serve.client.transports.nccl.buckets import buckets
from vllm_fp8ext.serve.client.transports.nccl.group import Group
from vllm_fp8ext.serve.tensors import TensorLike
from vllm_fp8ext.update.contract.update_errors import refusal

T = TypeVar("T")

_SHORTEST_PAUSE, _LONGEST_PAUSE, _LOOK_SECONDS = 0.0005, 0.02, 0.25
"""Seconds between two looks at the group, and at the servers. The pause is a tenth of the time that has passed, within
these."""

_LOOKS = 4
"""How often the servers are looked at after the group failed here."""


@dataclass(frozen=True)
class _Servers:
    """Open updates, and how all their servers are called."""

    updates: Mapping[Endpoint, schema.Update]
    everywhere: Everywhere

    def each(self, flow: Callable[[Endpoint, schema.Update], Flow[T]]) -> Flow[list[T]]:
        by_url = yield from self.everywhere(
            list(self.updates), lambda endpoint: flow(endpoint, self.updates[endpoint])
        )
        return list(by_url.values())


def broadcast(
    updates: Mapping[Endpoint, schema.Update],
    tensors: Iterable[tuple[str, TensorLike]],
    limit: int,
    group: Group | None,
    progress: Progress | None,
    everywhere: Everywhere,
    beside: Iterable[schema.Update] = (),
) -> Flow[None]:
    """Broadcast tensors to the servers of open updates, until all are staged everywhere. `beside`: the same update on servers
    that have committed it, by which buckets are as large as they were.

    Raises:
        ValueError: a tensor that can't be sent.
        UpdateError: a refusal, as `everywhere` tells it; `transfer-timeout` or `transfer-failed`.
    """
    if not updates:
        return
    used, whole, servers = group or Group(), False, _Servers(updates, everywhere)
    try:
        yield from _quiet(servers)
        limits = [update.max_receive_bytes for update in (*updates.values(), *beside)]
        yield from _broadcast(
            servers, tensors, min([limit, *filter(None, limits)]), used, Counter(progress, None)
        )
        whole = True
    finally:
        if group is None or not whole:  # ranks may be out of step with a group that was left in the middle
            used.close()


def _broadcast(
    servers: _Servers,
    tensors: Iterable[tuple[str, TensorLike]],
    limit: int,
    group: Group,
    counter: Counter,
) -> Flow[None]:
    ranks = {endpoint.url: update.world_size for endpoint, update in servers.updates.items()}
    group.confirm(update.group for update in servers.updates.values())
    sent = size = 0
    for bucket in buckets(tensors, limit, partial(group.room, ranks)):
        places = group.meet(ranks, bucket.device)
        data = yield from work(bucket.data)
        listed, mark = bucket.listed, bucket.mark.hex()
        receive = partial(schema.Receive, n=sent, bytes=bucket.bytes, mark=mark, tensors=listed)
        yield from servers.each(partial(_told, receive, places))
        sent += 1
        yield from _until(group.joined if sent == 1 else group.done, group.seconds, servers, sent)
        counter.end_chunk(sent, size)
        yield from _tried(partial(group.begin, data), servers, sent)
        size = bucket.end
    if sent:
        yield from _until(group.done, group.seconds, servers, sent)
        counter.end_chunk(sent, size)
        yield from _staged(servers, sent)
    require_no_others(servers.updates.values(), sent)


def _told(
    receive: Callable[..., schema.Receive],
    places: Mapping[str, schema.BroadcastGroup],
    endpoint: Endpoint,
    update: schema.Update,
) -> Flow[schema.Update]:
    return calls.receive(endpoint, update.id, receive(group=places[endpoint.url]))


def _until(done: Callable[[], bool], seconds: float, servers: _Servers, sent: int) -> Flow[None]:
    """Wait for the group; not if the servers have given up what was told them."""
    begun = looked = time.monotonic()
    while not (yield from _tried(done, servers, sent)):
        now = time.monotonic()
        if now > looked + _LOOK_SECONDS:
            yield from _busy(servers, sent)
            looked = time.monotonic()
        if now > begun + seconds:
            raise UpdateError("transfer-timeout", f"a broadcast did not end within {seconds:g} s", status=408)
        yield Wait(min(_SHORTEST_PAUSE + (now - begun) / 10, _LONGEST_PAUSE))


def _tried(step: Callable[[], T], servers: _Servers, sent: int) -> Flow[T]:
    """A step of the group. When it fails because a rank has left, what the server says of that is the error to report."""
    try:
        return (yield from work(step))
    except UpdateError:
        for _ in range(_LOOKS):
            yield from _busy(servers, sent)
            yield Wait(_LOOK_SECONDS)
        raise


def _quiet(servers: _Servers) -> Flow[None]:
    """Wait until the ranks have ended, or given up, what an interrupted push told them."""
    if any(chunk.busy for update in servers.updates.values() for chunk in update.chunks.values()):
        yield from _staged(servers, 0)


def _staged(servers: _Servers, sent: int) -> Flow[None]:
    """Wait until the servers have staged what they were sent."""
    seconds = max(endpoint.timeout for endpoint in servers.updates)
    begun = time.monotonic()
    while (yield from _busy(servers, sent)):
        now = time.monotonic()
        if now > begun + seconds:
            message = f"what was broadcast was not staged within {seconds:g} s"
            raise UpdateError("transfer-timeout", message, status=408)
        yield Wait(min(_SHORTEST_PAUSE + (now - begun) / 10, _LONGEST_PAUSE))


def _busy(servers: _Servers, sent: int) -> Flow[bool]:
    """Return whether a server has still to stage some of the first `sent` chunks.

    Raises:
        UpdateError: it has refused some.
    """

    def busy(endpoint: Endpoint, update: schema.Update) -> Flow[bool]:
        current = yield from calls.update(endpoint, update.id)
        chunks = [current.chunks[str(n)] for n in range(sent) if str(n) in current.chunks]
        if any(not chunk.staged and not chunk.busy for chunk in chunks):
            raise refusal(current.problems)
        return any(chunk.busy for chunk in current.chunks.values())

    return any((yield from servers.each(busy)))
