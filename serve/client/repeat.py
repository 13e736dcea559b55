# SPDX-License-Identifier: Apache-2.0
"""Decides which failed calls are repeated, how often, and when."""

import random
import time
from typing import TypeVar

import httpx
from pydantic import TypeAdapter

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.client.answers import parsed
from vllm_fp8ext.serve.client.flow import Endpoint, Flow, Request, Wait, send

T = TypeVar("T")

FIRST_SECONDS = 0.25
"""Longest pause before the first repetition; it doubles with each."""
LONGEST_SECONDS = 15.0
"""Longest pause of all."""

_UNSENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.ProxyError)
_DROPPED = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.TimeoutException, httpx.ProxyError)
_GATEWAY = (502, 503, 504)


def call(endpoint: Endpoint, request: Request, form: TypeAdapter[T]) -> Flow[T]:
    """Send a request, and return the body of its success. It is sent again where that is safe and may help.

    Raises:
        UpdateError: a refusal.
        httpx.TransportError: no answer.
    """
    deadline = time.monotonic() + request.timeout
    failures = pauses = 0
    unknown: Exception | None = None
    """The first one after which nobody knows what the server did."""
    while True:
        try:
            return parsed((yield from send(request)), form)
        except (UpdateError, httpx.TransportError) as error:
            failures += not _busy(error)
            if unknown is None and lost(error) and not unsent(error):
                unknown = error
            pause = backoff(pauses)
            spent = failures > endpoint.retries or time.monotonic() + pause > deadline
            if spent or not _may_help(request, error):
                if unknown is not None and unsent(error):
                    raise unknown from error
                raise
        yield Wait(pause)
        pauses += 1


def backoff(n: int) -> float:
    """Seconds to wait before repetition `n` (from 0): exponential, with jitter that keeps clients from coming together."""
    return min(FIRST_SECONDS * 2.0 ** min(n, 16), LONGEST_SECONDS) * random.uniform(0.5, 1.0)


def unsent(error: BaseException) -> bool:
    """Return whether the server has not seen any of the request."""
    return isinstance(error, _UNSENT)


def nobody_listens(error: BaseException) -> bool:
    """Return whether the server's machine has refused the connection: no process is there that could answer anybody."""
    if not isinstance(error, httpx.ConnectError) or isinstance(error, httpx.ProxyError):
        return False
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ConnectionRefusedError):
        cause = cause.__cause__ or cause.__context__
    return cause is not None


def lost(error: BaseException) -> bool:
    """Return whether there was no answer of the server itself. What it did, if anything, is unknown."""
    if isinstance(error, UpdateError):
        return error.kind == "http" and error.status in _GATEWAY
    return isinstance(error, _DROPPED)


def undecided(error: BaseException) -> bool:
    """Return whether a commit that failed so may take place all the same. A busy engine comes to it later."""
    return lost(error) or (isinstance(error, UpdateError) and error.kind == "engine-timeout")


def lost_by(endpoint: Endpoint, error: BaseException) -> bool:
    """Return whether it was this server that did not answer. What makes tensors may ask others, by httpx too."""
    if isinstance(error, httpx.RequestError):
        try:
            failed_url, server_url = error.request.url, httpx.URL(endpoint.url)
        except RuntimeError:  # not known
            return False
        # as httpx writes them: a host in capitals, or a scheme's own port, is written otherwise
        if (failed_url.scheme, failed_url.host, failed_url.port) != (
            server_url.scheme,
            server_url.host,
            server_url.port,
        ):
            return False
    return lost(error)


def _may_help(request: Request, error: UpdateError | httpx.TransportError) -> bool:
    if not request.repeatable:
        return unsent(error)
    if isinstance(error, UpdateError):
        stalled = error.kind == "upload-stalled"  # this side had no time for it
        return _busy(error) or stalled or (error.status in _GATEWAY and error.kind != "poisoned")
    return lost(error)


def _busy(error: Exception) -> bool:
    """Not a failure: the same chunk is still being staged. It is waited for, not counted."""
    return isinstance(error, UpdateError) and error.kind == "chunk-busy"
