# SPDX-License-Identifier: Apache-2.0
"""The servers of `Replicas`, which may come and go between updates: who takes part, and how those that come late catch up."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve import schema
from vllm_fp8ext.serve.client import calls
from vllm_fp8ext.serve.client.everywhere import listed, messages, not_committed, on_all, outcomes
from vllm_fp8ext.serve.client.flow import Endpoint, Flow, work
from vllm_fp8ext.serve.client.options import ReplicasPushOptions
from vllm_fp8ext.serve.client.repeat import nobody_listens
from vllm_fp8ext.serve.client.replicas import push_everywhere
from vllm_fp8ext.serve.client.servers import Servers, ServersList
from vllm_fp8ext.serve.client.source import Pushable

logger = logging.getLogger("vllm.fp8ext")

AWAITING = ("not-current", "no-weights")
"""States of servers that answer no requests until they have the weights of the others."""
_SERVING = ("serving", "updating")
_OF_THE_OTHERS = ("version", "base_epoch", "partial", "sparse", "id", "instances", "becomes_current")
"""Options of a push that servers which are current decide for a late one."""


class Fleet:
    """Servers as they are named somewhere, and what was pushed to all of them last.

    Raises:
        ValueError: one text instead of URLs.
        ConfigError: as `Client`.
    """

    def __init__(
        self, servers: Iterable[str] | Servers, key: str | None, *, timeout: float, retries: int
    ) -> None:
        self._key, self._timeout, self._retries = key, timeout, retries
        self.servers: Servers = ServersList(servers) if isinstance(servers, Iterable) else servers
        self.pushed: str | PathLike[str] | None = None
        """Path of the weights that all of them serve, where it was a path."""
        if self.servers.fixed:  # what is wrong with them is told at once
            self.endpoints()

    def endpoints(self) -> tuple[Endpoint, ...]:
        """Look where the servers are."""
        options: dict[str, Any] = {"timeout": self._timeout, "retries": self._retries}
        addresses = self.servers.addresses()
        endpoints = [Endpoint.of(each.url, self._key, host=each.host, **options) for each in addresses]
        if self.servers.fixed:
            return tuple(endpoints)
        return tuple({each.url: each for each in endpoints}.values())  # some are written with a slash


@dataclass(frozen=True)
class Present:
    """Servers that are there now. `weights`: what they say of themselves, by URL, unless they do not answer."""

    endpoints: tuple[Endpoint, ...]
    weights: Mapping[str, schema.Weights]

    def awaiting(self) -> list[Endpoint]:
        """Return the servers that answer no requests until they have the weights of the others."""
        return [each for each in self.endpoints if self._state(each) in AWAITING]

    def serving(self) -> list[Endpoint]:
        """Return the servers that answer requests."""
        return [each for each in self.endpoints if self._state(each) in _SERVING]

    def _state(self, endpoint: Endpoint) -> str | None:
        served = self.weights.get(endpoint.url)
        return served.state if served else None


def push_to_all(
    fleet: Fleet, weights: Pushable, /, options: ReplicasPushOptions
) -> Flow[dict[str, schema.Update]]:
    """Push to all servers that there are: open, send and prepare everywhere, and only then commit (`push_everywhere`).

    Where a file or DNS names the servers, one at which nobody listens is not there yet, or no more. A server that is not
    current becomes so by a full update; with `partial` or `base_epoch` it is left out, and stays so until it has caught up.

    Keywords are the fields of `ReplicasPushOptions`.

    Returns: the committed updates by URL.

    Raises:
        ValueError: as `Client.push`; the update is abandoned everywhere.
        UpdateError: `no-servers`; `not-committed`, abandoned everywhere, with `details["failed"]`, the errors by URL; or,
            where some serve the update, or may, `partly-committed`, with `details["committed"]` (epochs by URL), `failed` and
            `id`.
    """
    if fleet.servers.fixed:
        endpoints = yield from work(fleet.endpoints)
    else:
        endpoints = yield from _able(fleet, options)
    updates = yield from push_everywhere(endpoints, weights, options)
    fleet.pushed = (
        weights if isinstance(weights, str | PathLike) and not (options.partial or options.sparse) else None
    )
    return updates


def _able(fleet: Fleet, options: ReplicasPushOptions) -> Flow[tuple[Endpoint, ...]]:
    """Return the servers that an update can be pushed to."""
    present = yield from look(fleet)
    if not options.partial and options.base_epoch is None:
        return present.endpoints
    late = present.awaiting()
    if late:
        logger.warning("fp8ext: left out until they have caught up: %s", ", ".join(each.url for each in late))
    able = tuple(each for each in present.endpoints if each not in late)
    if not able:
        urls = ", ".join(each.url for each in late)
        raise UpdateError("no-servers", f"no server is current: expected a full update, for {urls}")
    return able


def look(fleet: Fleet) -> Flow[Present]:
    """Ask all servers what they serve. Where nobody listens there is none, unless it must be there; two addresses of one
    server are one.

    Raises:
        UpdateError: `no-servers`.
    """
    endpoints = yield from work(fleet.endpoints)
    weights, failed = yield from outcomes(endpoints, lambda each: calls.weights(replace(each, retries=0)))
    absent = {url for url, error in failed.items() if nobody_listens(error) and not fleet.servers.fixed}
    if absent:
        logger.warning("fp8ext: not there: %s", ", ".join(sorted(absent)))
    first: dict[str, str] = {}
    for url, served in weights.items():
        first.setdefault(served.instance or url, url)
    again = weights.keys() - first.values()
    there = tuple(each for each in endpoints if each.url not in absent | again)
    if not there:
        raise UpdateError("no-servers", f"nobody listens at {', '.join(sorted(absent))}", status=503)
    return Present(there, weights)


def catch_up(
    fleet: Fleet, weights: Pushable | None = None, /, **options: Any
) -> Flow[dict[str, schema.Weights]]:
    """Bring servers that are not current to what the others serve, before they answer requests.

    A server that has loaded the same weights is told so. To another one `weights` are pushed, by default the path that was
    pushed to all last; then its digests must be those of a server that serves. Servers that do not answer wait for the next
    call. Nothing is to be done while no server is current: a push brings all to the same weights.

    Keywords are the fields of `ReplicasPushOptions` but for those that the other servers decide: `version`, `base_epoch`,
    `partial`, `id`, `instances`, `becomes_current`.

    Returns: what the servers that have caught up serve, by URL.

    Raises:
        ValueError: as `Client.push`.
        UpdateError: `no-servers`; `replicas-differ`: the others serve different versions; `no-source`: neither weights nor a
            path; `not-committed`; `digests-differ`: these servers, named in `details["failed"]`, hold other weights than the
            others, and answer no requests.
    """
    wrong = sorted(options.keys() & set(_OF_THE_OTHERS))
    if wrong:
        raise ValueError(f"catch_up: expected no {', '.join(wrong)}: the servers that are current tell it")
    push_options = ReplicasPushOptions(**options)
    present = yield from look(fleet)
    late, current = present.awaiting(), present.serving()
    if not late or not current:
        return {}
    expected = yield from _served_by(current, present.weights)
    loaded = [each for each in late if present.weights[each.url].state == "not-current"]
    held = yield from on_all(loaded, calls.digests)
    lacking = [each for each in late if each.url not in held or not _same(held[each.url], expected)]
    if lacking:
        source = fleet.pushed if weights is None else weights
        if source is None:
            urls = ", ".join(each.url for each in lacking)
            message = (
                f"{urls}: not current, and nothing is at hand to bring: expected the weights of version "
                f"{expected.version}, or a push to all"
            )
            raise UpdateError("no-source", message)
        push_options = replace(push_options, version=expected.version, becomes_current=False)
        yield from push_everywhere(tuple(lacking), source, push_options)
        held |= yield from on_all(lacking, calls.digests)
    return (yield from _told(late, held, expected, current[0]))


def _served_by(current: list[Endpoint], weights: Mapping[str, schema.Weights]) -> Flow[schema.Digests]:
    """Return the digests of what servers serve. All of them must name the same version."""
    versions = {each.url: weights[each.url].version for each in current}
    if len(set(versions.values())) > 1:
        message = f"the servers serve different versions: {listed(versions)}; push the same to all"
        raise UpdateError("replicas-differ", message, found=versions)
    return (yield from calls.digests(current[0]))


def _told(
    late: list[Endpoint], held: Mapping[str, schema.Digests], expected: schema.Digests, peer: Endpoint
) -> Flow[dict[str, schema.Weights]]:
    """Tell servers that they are current, if their digests are those of a peer.

    The peer must serve these still.
    """
    now = yield from calls.weights(peer)
    if (now.epoch, now.instance) != (expected.epoch, expected.instance):
        message = f"{peer.url} serves epoch {now.epoch}, no more epoch {expected.epoch}: catch up again"
        raise UpdateError("replicas-differ", message, expected=expected.epoch, found=now.epoch)

    def tell(endpoint: Endpoint) -> Flow[schema.Weights]:
        mine = held[endpoint.url]
        return calls.declare_current(endpoint, mine.epoch, version=expected.version, instance=mine.instance)

    same = [each for each in late if _same(held[each.url], expected)]
    told, failed = yield from outcomes(same, tell)
    if failed:
        raise not_committed(messages(failed))
    differing = {each.url: _difference(held[each.url], expected) for each in late if each not in same}
    if differing:
        message = f"not current, and answering nobody: {listed(differing)}"
        raise UpdateError("digests-differ", message, failed=differing)
    return told


def _same(one: schema.Digests, other: schema.Digests) -> bool:
    return one.digests == other.digests


def _difference(actual: schema.Digests, expected: schema.Digests) -> str:
    names = sorted(
        name
        for name in actual.digests.keys() | expected.digests.keys()
        if actual.digests.get(name) != expected.digests.get(name)
    )
    ranks = [len(next(iter(each.digests.values()), {})) for each in (actual, expected)]
    if ranks[0] != ranks[1]:
        return f"expected {ranks[1]} ranks, as the others have, found {ranks[0]}"
    return f"{len(names)} tensors differ from version {expected.version} of the others, {names[0]} first"
