# SPDX-License-Identifier: Apache-2.0
"""The flow that sends weights to several servers and commits them on all, or on none."""

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve import schema
from vllm_fp8ext.serve.client import calls
from vllm_fp8ext.serve.client.flow import Endpoint, Flow, Wait, together
from vllm_fp8ext.serve.client.lent import end
from vllm_fp8ext.serve.client.progress import Progress
from vllm_fp8ext.serve.client.push import abandon_quietly
from vllm_fp8ext.serve.client.repeat import backoff, lost, undecided
from vllm_fp8ext.serve.client.source import Pushable, source_of, tensors_of
from vllm_fp8ext.serve.client.transports.http.chunks import CHUNKS_IN_FLIGHT, Sending, send_chunks
from vllm_fp8ext.serve.client.transports.nccl.broadcast import BUCKET_BYTES, broadcast
from vllm_fp8ext.serve.client.transports.nccl.group import Group

T = TypeVar("T")


def push_everywhere(
    endpoints: tuple[Endpoint, ...],
    /,
    weights: Pushable,
    *,
    version: str | int | None = None,
    base_epoch: int | None = None,
    instances: Mapping[str, str] | None = None,
    partial: bool = False,
    running: schema.Running = "keep",
    wait_seconds: float | None = None,
    canary: schema.Canary | None = None,
    kv_scales: schema.KvScales | None = None,
    expert_layout: schema.ExpertLayout | None = None,
    transport: Literal["http", "nccl"] = "http",
    group: Group | None = None,
    chunk_bytes: int | None = None,
    chunks_in_flight: int = CHUNKS_IN_FLIGHT,
    checksum: bool = True,
    fp8: bool = False,
    id: str | None = None,
    progress: Progress | None = None,
) -> Flow[dict[str, schema.Update]]:
    """Open on all servers, send each chunk to all, prepare on all, and only then commit on all.

    Arguments are those of `push`, but `instances`: the life of each server that this is for, by its URL. The update has one
    id on all servers. With the `id` of an update that is served by some of them only, the others follow. `progress` counts
    the bytes of all servers together, in whatever thread sends them; a bucket of a broadcast, which goes to all at once,
    counts once.

    Returns: the committed updates by URL.

    Raises:
        ValueError: as `push`; the update is abandoned everywhere.
        UpdateError: `not-committed`, abandoned everywhere, with `details["failed"]`, the errors by URL; or, where some serve
            the update, or may, `partly-committed`, with `details["committed"]` (epochs by URL), `failed` and `id`.
    """
    if not endpoints or len({endpoint.url for endpoint in endpoints}) < len(endpoints):
        raise ValueError(f"expected distinct URLs, found {[endpoint.url for endpoint in endpoints]}")

    sending = Sending(
        chunk_bytes=chunk_bytes, in_flight=chunks_in_flight, checksum=checksum, progress=progress
    )

    def manifests() -> Flow[list[dict[str, Any]]]:
        found = yield from _on_all(endpoints, calls.manifest)
        return list(found.values())

    if transport == "nccl":
        tensors = yield from tensors_of(weights, manifests, fp8=fp8)
    elif transport == "http":
        source = yield from source_of(weights, manifests, fp8=fp8)
    else:
        raise ValueError(f"transport: expected http, nccl, found {transport!r}")
    update_id = id or uuid.uuid4().hex

    def opened(endpoint: Endpoint) -> Flow[schema.Update]:
        return calls.open(
            endpoint,
            version=version,
            base_epoch=base_epoch,
            instance=(instances or {}).get(endpoint.url),
            partial=partial,
            running=running,
            wait_seconds=wait_seconds,
            canary=canary,
            kv_scales=kv_scales,
            expert_layout=expert_layout,
            id=update_id,
        )

    committed: dict[str, schema.Update] = {}
    unknown = False
    try:
        updates, failed = yield from _outcomes(endpoints, opened)
        committed = {url: update for url, update in updates.items() if update.state == "committed"}
        unknown = id is not None and any(map(lost, failed.values()))
        if failed:
            raise _not_committed(_messages(failed))
        waiting = [endpoint for endpoint in endpoints if endpoint.url not in committed]
        told = {endpoint: updates[endpoint.url] for endpoint in waiting}
        beside = tuple(committed.values())
        if transport == "nccl":
            yield from broadcast(
                told, tensors.pairs, chunk_bytes or BUCKET_BYTES, group, progress, _on_all, beside
            )
        else:
            yield from send_chunks(told, source, sending, _on_all, beside)
        yield from _on_all(waiting, lambda endpoint: calls.prepare(endpoint, update_id))
    except BaseException as error:
        end(weights)
        if not committed and not unknown:
            yield from _abandon(endpoints, update_id)
        elif isinstance(error, UpdateError):  # the others can still follow
            others = {endpoint.url: str(error) for endpoint in endpoints if endpoint.url not in committed}
            raise _partly_committed(update_id, committed, error.details.get("failed", others)) from error
        raise
    try:
        return (yield from _commit(waiting, update_id, committed, calls.patience(running, wait_seconds)))
    except Exception:
        raise
    except BaseException as stop:
        # cancelled: a commit that waits for running requests would come all the same
        if not committed:
            yield from _abandon(endpoints, update_id)
        stop.add_note(f"update {update_id} was about to be committed everywhere: some servers may serve it")
        raise


def _commit(
    endpoints: Sequence[Endpoint],
    id: str,
    committed: dict[str, schema.Update],
    wait_seconds: float | None,
) -> Flow[dict[str, schema.Update]]:
    """Commit everywhere; where that fails while it may have happened elsewhere, again."""
    retries = max((endpoint.retries for endpoint in endpoints), default=0)
    deadline = time.monotonic() + max((endpoint.timeout for endpoint in endpoints), default=0.0)
    deadline += wait_seconds or 0.0
    attempt = 0
    while True:
        done, failed = yield from _outcomes(
            [endpoint for endpoint in endpoints if endpoint.url not in committed],
            lambda endpoint: calls.commit(endpoint, id, wait_seconds=wait_seconds),
        )
        committed |= done
        if not failed:
            return committed
        if not committed and not any(map(undecided, failed.values())):
            yield from _abandon(endpoints, id)
            raise _not_committed(_messages(failed))
        if attempt == retries or time.monotonic() > deadline:
            raise _partly_committed(id, committed, _messages(failed))
        yield Wait(backoff(attempt))
        attempt += 1


def _on_all(endpoints: Iterable[Endpoint], flow: Callable[[Endpoint], Flow[T]]) -> Flow[dict[str, T]]:
    """What the flow returns for each server, by URL.

    Raises:
        UpdateError: it failed for one of them.
    """
    done, failed = yield from _outcomes(endpoints, flow)
    if failed:
        raise _not_committed(_messages(failed))
    return done


def _outcomes(
    endpoints: Iterable[Endpoint], flow: Callable[[Endpoint], Flow[T]]
) -> Flow[tuple[dict[str, T], dict[str, Exception]]]:
    endpoints = list(endpoints)
    outcomes = yield from together(flow(endpoint) for endpoint in endpoints)
    done: dict[str, T] = {}
    failed: dict[str, Exception] = {}
    for endpoint, outcome in zip(endpoints, outcomes, strict=True):
        if isinstance(outcome, Exception):
            failed[endpoint.url] = outcome
        else:
            done[endpoint.url] = outcome
    return done, failed


def _abandon(endpoints: Iterable[Endpoint], id: str) -> Flow[None]:
    """Everywhere: where the answer to opening was lost, the update may be open all the same."""
    yield from together(abandon_quietly(endpoint, id) for endpoint in endpoints)


def _not_committed(failed: Mapping[str, str]) -> UpdateError:
    return UpdateError("not-committed", f"not committed: {_listed(failed)}", status=409, failed=failed)


def _partly_committed(
    id: str, committed: Mapping[str, schema.Update], failed: Mapping[str, str]
) -> UpdateError:
    epochs = {url: (update.result or {}).get("epoch") for url, update in committed.items()}
    message = (
        f"update {id} is served by {', '.join(epochs) or 'none for certain'}, not or not for certain by the others; "
        f"push the same weights with id={id!r} to go on: {_listed(failed)}"
    )
    return UpdateError("partly-committed", message, status=500, id=id, committed=epochs, failed=failed)


def _messages(failed: Mapping[str, Exception]) -> dict[str, str]:
    return {url: str(error) or type(error).__name__ for url, error in failed.items()}


def _listed(messages: Mapping[str, str]) -> str:
    return "; ".join(f"{url}: {message}" for url, message in messages.items())
