# SPDX-License-Identifier: Apache-2.0
"""The flow that broadcasts tensors to all ranks of one server, or of several at once.

While a bucket is broadcast the next one is packed and told to the servers: its ranks begin to wait for it once they have
staged the one before. So a rank waits, on its GPU, only for what is there to be sent.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TypeVar

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve import schema
from vllm_fp8ext.serve.client import calls
from vllm_fp8ext.serve.client.buckets import buckets
from vllm_fp8ext.serve.client.flow import Endpoint, Flow, Wait, together, work
from vllm_fp8ext.serve.client.group import Group
from vllm_fp8ext.serve.client.progress import Counter, Progress
from vllm_fp8ext.serve.tensors import TensorLike
from vllm_fp8ext.weights.refusals import refusal

BUCKET_BYTES = 1 << 30
"""Bytes of a bucket, unless a server takes less. Two of them are held here, one in each rank."""

T = TypeVar("T")

_SHORTEST_PAUSE, _LONGEST_PAUSE, _LOOK_SECONDS = 0.0005, 0.02, 0.25
"""Seconds between two looks at the group (a tenth of the time that has passed, within these), and at the servers."""

_LOOKS = 4
"""How often the servers are looked at after the group failed here."""


def broadcast(
    updates: Mapping[Endpoint, schema.Update],
    tensors: Iterable[tuple[str, TensorLike]],
    limit: int,
    group: Group | None,
    progress: Progress | None,
    beside: Iterable[schema.Update] = (),
) -> Flow[None]:
    """Send tensors to the servers of these open updates, until all of them are staged everywhere. `beside`: the same update
    on servers that have committed it, by which buckets are as large as they were.

    Raises:
        ValueError: a tensor that can't be sent.
        UpdateError: a refusal, of any server; `transfer-timeout` or `transfer-failed`.
    """
    if not updates:
        return
    used, whole = group or Group(), False
    try:
        yield from _quiet(updates)
        limits = [update.max_receive_bytes for update in (*updates.values(), *beside)]
        yield from _broadcast(
            updates, tensors, min([limit, *filter(None, limits)]), used, Counter(progress, None)
        )
        whole = True
    finally:
        if group is None or not whole:  # ranks may be out of step with a group that was left in the middle
            used.close()


def _broadcast(
    updates: Mapping[Endpoint, schema.Update],
    tensors: Iterable[tuple[str, TensorLike]],
    limit: int,
    group: Group,
    counter: Counter,
) -> Flow[None]:
    ranks = {endpoint.url: update.world_size for endpoint, update in updates.items()}
    group.confirm(update.group for update in updates.values())
    sent = size = 0
    for bucket in buckets(tensors, limit):
        places = group.meet(ranks, bucket.tensors[0].device)
        data = yield from work(partial(group.pack, sent, bucket))
        yield from _on_all(
            calls.receive(
                endpoint,
                update.id,
                schema.Receive(
                    n=sent,
                    group=places[endpoint.url],
                    bytes=bucket.bytes,
                    mark=bucket.mark.hex(),
                    tensors=bucket.listed,
                ),
            )
            for endpoint, update in updates.items()
        )
        sent += 1
        yield from _until(group.joined if sent == 1 else group.done, group.seconds, updates, sent)
        counter.end_chunk(sent, size)
        yield from _tried(partial(group.begin, data), updates, sent)
        size = bucket.end
    if sent:
        yield from _until(group.done, group.seconds, updates, sent)
        counter.end_chunk(sent, size)
        yield from _staged(updates, sent)


def _until(
    done: Callable[[], bool], seconds: float, updates: Mapping[Endpoint, schema.Update], sent: int
) -> Flow[None]:
    """Wait for the group; not if the servers have given up what was told them."""
    begun = looked = time.monotonic()
    while not (yield from _tried(done, updates, sent)):
        now = time.monotonic()
        if now > looked + _LOOK_SECONDS:
            yield from _busy(updates, sent)
            looked = time.monotonic()
        if now > begun + seconds:
            raise UpdateError("transfer-timeout", f"a broadcast did not end within {seconds:g} s", status=408)
        yield Wait(min(_SHORTEST_PAUSE + (now - begun) / 10, _LONGEST_PAUSE))


def _tried(step: Callable[[], T], updates: Mapping[Endpoint, schema.Update], sent: int) -> Flow[T]:
    """A step of the group. When it fails because a rank has left, what the server says of that is the error to report."""
    try:
        return (yield from work(step))
    except UpdateError:
        for _ in range(_LOOKS):
            yield from _busy(updates, sent)
            yield Wait(_LOOK_SECONDS)
        raise


def _quiet(updates: Mapping[Endpoint, schema.Update]) -> Flow[None]:
    """Wait until the ranks of these servers, as they were opened, have ended, or given up, what a push told them before that
    was interrupted."""
    if any(chunk.busy for update in updates.values() for chunk in update.chunks.values()):
        yield from _staged(updates, 0)


def _staged(updates: Mapping[Endpoint, schema.Update], sent: int) -> Flow[None]:
    """Wait until the servers have staged what they were sent."""
    seconds = max(endpoint.timeout for endpoint in updates)
    begun = time.monotonic()
    while (yield from _busy(updates, sent)):
        now = time.monotonic()
        if now > begun + seconds:
            message = f"what was broadcast was not staged within {seconds:g} s"
            raise UpdateError("transfer-timeout", message, status=408)
        yield Wait(min(_SHORTEST_PAUSE + (now - begun) / 10, _LONGEST_PAUSE))


def _busy(updates: Mapping[Endpoint, schema.Update], sent: int) -> Flow[bool]:
    """Whether a server has still to stage some of the first `sent` chunks.

    Raises:
        UpdateError: it has refused some.
    """
    found = yield from _on_all(calls.update(endpoint, update.id) for endpoint, update in updates.items())
    for update in found:
        chunks = [update.chunks[str(n)] for n in range(sent) if str(n) in update.chunks]
        if any(not chunk.staged and not chunk.busy for chunk in chunks):
            raise refusal(update.problems)
    return any(chunk.busy for update in found for chunk in update.chunks.values())


def _on_all(flows: Iterable[Flow[schema.Update]]) -> Flow[list[schema.Update]]:
    flows = list(flows)
    if len(flows) == 1:
        return [(yield from flows[0])]
    outcomes = yield from together(flows)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return [outcome for outcome in outcomes if isinstance(outcome, schema.Update)]
