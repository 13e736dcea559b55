# SPDX-License-Identifier: Apache-2.0
"""The flow that sends weights to several servers and commits on all, or none."""

import time
import uuid
from collections.abc import Mapping
from typing import Any

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve import schema
from vllm_fp8ext.serve.client import calls
from vllm_fp8ext.serve.client.everywhere import listed, messages, not_committed, on_all, outcomes
from vllm_fp8ext.serve.client.flow import Endpoint, Flow, Wait, together
from vllm_fp8ext.serve.client.lent import end
from vllm_fp8ext.serve.client.options import ReplicasPushOptions
from vllm_fp8ext.serve.client.push import abandon_quietly
from vllm_fp8ext.serve.client.repeat import backoff, lost, undecided
from vllm_fp8ext.serve.client.source import Pushable
from vllm_fp8ext.serve.client.transports.registry import SENDERS
from vllm_fp8ext.serve.client.transports.sender import Sender


def push_everywhere(
    endpoints: tuple[Endpoint, ...], weights: Pushable, /, options: ReplicasPushOptions
) -> Flow[dict[str, schema.Update]]:
    """Push to all servers: open, send and prepare everywhere, and only then commit.

    Keywords are the fields of `ReplicasPushOptions`, which says what each means. The update has one id on all servers. With
    the `id` of an update that is served by some of them only, the others follow. `progress` counts the bytes of all servers
    together; a bucket of a broadcast, which goes to all at once, counts once.

    Returns: the committed updates by URL.

    Raises:
        ValueError: as `Client.push`; the update is abandoned everywhere.
        UpdateError: `not-committed`, abandoned everywhere, with `details["failed"]`, the errors by URL; or, where some serve
            the update, or may, `partly-committed`, with `details["committed"]` (epochs by URL), `failed` and `id`.
    """
    if not endpoints or len({endpoint.url for endpoint in endpoints}) < len(endpoints):
        raise ValueError(f"expected distinct URLs, found {[endpoint.url for endpoint in endpoints]}")

    def manifests() -> Flow[list[dict[str, Any]]]:
        by_url = yield from on_all(endpoints, calls.manifest)
        return list(by_url.values())

    sender = yield from SENDERS[options.transport].prepare(weights, options, manifests)
    update = _ReplicatedUpdate(endpoints, options)
    try:
        yield from update.stage(sender)
    except BaseException as error:
        end(weights)
        yield from update.give_up(error)
        raise
    try:
        return (yield from update.commit())
    except Exception:
        raise
    except BaseException as stop:
        # cancelled: a commit that waits for running requests would come all the same
        yield from update.cancel(stop)
        raise


class _ReplicatedUpdate:
    """One update, by one id, on every server. `committed`: by URL, on those that serve it."""

    def __init__(self, endpoints: tuple[Endpoint, ...], options: ReplicasPushOptions) -> None:
        self.id = options.id or uuid.uuid4().hex
        self.committed: dict[str, schema.Update] = {}
        self._endpoints = endpoints
        self._options = options
        self._maybe_committed = False
        """True once a server that did not answer may serve the update."""

    @property
    def _waiting(self) -> list[Endpoint]:
        """Servers that do not serve the update."""
        return [endpoint for endpoint in self._endpoints if endpoint.url not in self.committed]

    def stage(self, sender: Sender) -> Flow[None]:
        """Open, send and prepare the update on all servers that do not serve it."""
        updates, failed = yield from outcomes(self._endpoints, self._open)
        self.committed = {url: update for url, update in updates.items() if update.state == "committed"}
        self._maybe_committed = self._options.id is not None and any(map(lost, failed.values()))
        if failed:
            raise not_committed(messages(failed))
        waiting = self._waiting
        opened = {endpoint: updates[endpoint.url] for endpoint in waiting}
        yield from sender.send(opened, on_all, tuple(self.committed.values()))
        yield from on_all(waiting, lambda endpoint: calls.prepare(endpoint, self.id))

    def _open(self, endpoint: Endpoint) -> Flow[schema.Update]:
        options = self._options
        instance = (options.instances or {}).get(endpoint.url)
        return calls.open(endpoint, **options.opening(), instance=instance, id=self.id)

    def give_up(self, error: BaseException) -> Flow[None]:
        """Abandon what could not be staged, unless a server serves it: the others can still follow.

        Raises:
            UpdateError: `partly-committed`.
        """
        if not self.committed and not self._maybe_committed:
            yield from self._abandon()
        elif isinstance(error, UpdateError):
            others = {endpoint.url: str(error) for endpoint in self._waiting}
            raise self._partly_committed(error.details.get("failed", others)) from error

    def commit(self) -> Flow[dict[str, schema.Update]]:
        """Commit everywhere; where that fails while it may have happened elsewhere, again.

        Raises:
            UpdateError: `not-committed` or `partly-committed`.
        """
        patience = calls.patience(self._options.running, self._options.wait_seconds)
        waiting = self._waiting
        retries = max((endpoint.retries for endpoint in waiting), default=0)
        deadline = time.monotonic() + max((endpoint.timeout for endpoint in waiting), default=0.0)
        deadline += patience or 0.0
        attempt = 0
        while True:
            committed, failed = yield from outcomes(
                self._waiting, lambda endpoint: calls.commit(endpoint, self.id, wait_seconds=patience)
            )
            self.committed |= committed
            if not failed:
                return self.committed
            if not self.committed and not any(map(undecided, failed.values())):
                yield from self._abandon()
                raise not_committed(messages(failed))
            if attempt == retries or time.monotonic() > deadline:
                raise self._partly_committed(messages(failed))
            yield Wait(backoff(attempt))
            attempt += 1

    def cancel(self, stop: BaseException) -> Flow[None]:
        """Abandon an update whose commit the caller has given up. The exception says what may still happen."""
        if not self.committed:
            yield from self._abandon()
        stop.add_note(f"update {self.id} was about to be committed everywhere: some servers may serve it")

    def _abandon(self) -> Flow[None]:
        """Abandon it everywhere: where the answer to opening was lost, it may be open all the same."""
        yield from together(abandon_quietly(endpoint, self.id) for endpoint in self._endpoints)

    def _partly_committed(self, failed: Mapping[str, str]) -> UpdateError:
        epochs = {url: (update.result or {}).get("epoch") for url, update in self.committed.items()}
        message = (
            f"update {self.id} is served by {', '.join(epochs) or 'none for certain'}, not or not for certain by the "
            f"others; push the same weights with id={self.id!r} to go on: {listed(failed)}"
        )
        return UpdateError(
            "partly-committed", message, status=500, id=self.id, committed=epochs, failed=failed
        )
