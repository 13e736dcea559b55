# SPDX-License-Identifier: Apache-2.0
"""Flows and their steps. A flow is a generator that does no I/O: it yields steps and is sent their results, or their errors.

A driver takes the steps: `driver.BlockingDriver` one after the other, `driver.AsyncDriver` on an event loop. So each
operation of the client is written once.
"""

import os
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any, Self, TypeAlias, TypeVar
from urllib.parse import unquote

import httpx

from vllm_fp8ext.environment import ADMIN_KEY, DEFAULT_URL, URL, key_of
from vllm_fp8ext.errors import ConfigError
from vllm_fp8ext.serve.schema import PREFIX

T = TypeVar("T")

Sent = Callable[[int], None]
"""Called with the bytes of a body that have been sent; starts over when the body is sent again."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One server, as whom it is called, and with how much patience."""

    url: str
    key: str | None = field(repr=False)
    timeout: float
    """Seconds without a byte after which a call fails, and after which none is repeated."""
    retries: int
    """How often a call that failed may be repeated."""
    host: str | None = None
    """Name of the server, with its port, where `url` has its address: for the header `Host`, and for its certificate."""

    @classmethod
    def of(
        cls, url: str | None, key: str | None, *, timeout: float, retries: int, host: str | None = None
    ) -> Self:
        """Take a URL and a key, or those of the environment (`FP8EXT_URL`, `FP8EXT_ADMIN_KEY`). A blank key is none.

        The password of a URL, `http://x:KEY@host`, is a key, too: it does not stay in the URL, which errors and logs show.

        Raises:
            ConfigError: the URL has no scheme, or another one than HTTP's, or names a user without a password, or has another
                key than the one that is given; the key is not ASCII.
        """
        root, password = without_password((url or os.environ.get(URL) or DEFAULT_URL).rstrip("/"))
        if not root.lower().startswith(("http://", "https://")):
            raise ConfigError(f"url: expected the server's root, such as {DEFAULT_URL}, found {root}")
        given = key_of(key, "key") if key is not None else key_of(password, "the password of the URL")
        if password is not None and given != password:
            raise ConfigError("url: expected no password beside a key, or the same, found another")
        admin_key = key_of(os.environ.get(ADMIN_KEY)) if key is None and password is None else given
        return cls(url=root, key=admin_key, timeout=timeout, retries=retries, host=host)

    def request(
        self, method: str, path: str, *, extra_seconds: float | None = None, **more: Any
    ) -> "Request":
        """A call of a route; `extra_seconds` is what it may take beyond the timeout."""
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        headers |= {"Host": self.host} if self.host else {}
        headers |= more.pop("headers", {})
        timeout = self.timeout + (extra_seconds or 0.0)
        name = self.host.rpartition(":")[0] if self.host else None
        return Request(
            method, self.url + PREFIX + path, headers=headers, timeout=timeout, server_name=name, **more
        )


def without_password(root: str) -> tuple[str, str | None]:
    """Take the user and the password out of a URL.

    Raises:
        ConfigError: a user without a password, or a password with a slash.
    """
    scheme, separator, rest = root.partition("://")
    if not separator:
        return root.rpartition("@")[2], None
    host, slash, path = rest.partition("/")
    users, at, host = host.rpartition("@")
    _, colon, password = users.partition(":")
    if at and not (colon and password):
        raise ConfigError("url: expected no user, or a key as the password of one, found a user alone")
    _, colon, port = host.rpartition(":")
    if not at and "@" in path and colon and not (port.isdigit() or port.endswith("]")):
        raise ConfigError("url: expected a port; / in a password is written %2F")
    return f"{scheme}://{host}{slash}{path}", unquote(password) if at else None


@dataclass(frozen=True)
class Request:
    """Step: send this once. Results in the whole `httpx.Response`; fails with `httpx.TransportError`."""

    method: str
    url: str
    headers: dict[str, str] = field(repr=False)
    timeout: float
    json: Any = None
    content: Iterable[bytes] | None = None
    """A streamed body."""
    sent: Sent | None = None
    repeatable: bool = True
    """True where sending it twice does what sending it once does."""
    server_name: str | None = None
    """Name that the server's certificate must have, where it is not the URL's."""


@dataclass(frozen=True)
class Wait:
    """Step: let this many seconds pass."""

    seconds: float


@dataclass(frozen=True)
class Work:
    """Step: call a function that computes, copies or reads from disk. Results in what it returns."""

    function: Callable[[], Any]


@dataclass(frozen=True)
class Together:
    """Step: run flows at the same time, all to their ends. Results in a list of what each returned or raised."""

    flows: tuple["Flow[Any]", ...]


@dataclass(frozen=True)
class Pipelined:
    """Step: run flows, at most `width` of them at the same time. The next one is taken, on the caller's thread, when it may
    begin. Work that lies between flows is done before anything more is taken.

    It is over when nothing of it goes on any more, in success and in failure: when a flow or the iterable fails, none is
    begun any more, and those under way take no further step. Fails with what failed first.
    """

    flows: Iterable["Flow[Any] | Work"]
    width: int


Step: TypeAlias = Request | Wait | Work | Together | Pipelined
Flow: TypeAlias = Generator[Step, Any, T]


def work(function: Callable[[], T]) -> Flow[T]:
    """A `Work` step with its type."""
    result: T = yield Work(function)
    return result


def together(flows: Iterable[Flow[T]]) -> Flow[list[T | Exception]]:
    """A `Together` step with its type."""
    outcomes: list[T | Exception] = yield Together(tuple(flows))
    return outcomes


def pipelined(flows: Iterable[Flow[Any] | Work], width: int) -> Flow[None]:
    """A `Pipelined` step with its type."""
    yield Pipelined(flows, width)


def send(request: Request) -> Flow[httpx.Response]:
    """A `Request` step with its type."""
    response: httpx.Response = yield request
    return response
