# SPDX-License-Identifier: Apache-2.0
"""How a flow is run on the servers of a push: on one, or on several beside each other."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, TypeVar

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.client.flow import Endpoint, Flow, together

T = TypeVar("T")

Everywhere: TypeAlias = Callable[[list[Endpoint], Callable[[Endpoint], Flow[Any]]], Flow[dict[str, Any]]]
"""Runs a flow on each of some servers, and returns what each returned, by URL; fails when it fails on one."""


def on_one(endpoints: list[Endpoint], flow: Callable[[Endpoint], Flow[T]]) -> Flow[dict[str, T]]:
    """Run a flow on the one server there is: its errors are raised as they are."""
    [endpoint] = endpoints
    return {endpoint.url: (yield from flow(endpoint))}


def on_all(endpoints: Iterable[Endpoint], flow: Callable[[Endpoint], Flow[T]]) -> Flow[dict[str, T]]:
    """Run a flow on each server, and return what it returned, by URL.

    Raises:
        UpdateError: `not-committed`: it failed for one of them.
    """
    done, failed = yield from outcomes(endpoints, flow)
    if failed:
        raise not_committed(messages(failed))
    return done


def outcomes(
    endpoints: Iterable[Endpoint], flow: Callable[[Endpoint], Flow[T]]
) -> Flow[tuple[dict[str, T], dict[str, Exception]]]:
    """Run a flow on each server. Return what each returned, and what it raised, by URL."""
    endpoints = list(endpoints)
    results = yield from together(flow(endpoint) for endpoint in endpoints)
    done: dict[str, T] = {}
    failed: dict[str, Exception] = {}
    for endpoint, result in zip(endpoints, results, strict=True):
        if isinstance(result, Exception):
            failed[endpoint.url] = result
        else:
            done[endpoint.url] = result
    return done, failed


def not_committed(failed: Mapping[str, str]) -> UpdateError:
    """Return the error of an update that no server serves. `failed`: why, by URL."""
    return UpdateError("not-committed", f"not committed: {listed(failed)}", status=409, failed=failed)


def messages(failed: Mapping[str, Exception]) -> dict[str, str]:
    """Return what errors say, by URL."""
    return {url: str(error) or type(error).__name__ for url, error in failed.items()}


def listed(failed: Mapping[str, str]) -> str:
    """Return messages by URL as one text."""
    return "; ".join(f"{url}: {message}" for url, message in failed.items())
