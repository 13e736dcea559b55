# SPDX-License-Identifier: Apache-2.0
"""The flows as methods, for one server and for several: of classes that block, and of classes to be awaited."""

import functools
from collections.abc import Callable, Coroutine, Iterable
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

import httpx

from vllm_fp8ext.serve.client import calls
from vllm_fp8ext.serve.client.driver import AsyncDriver, BlockingDriver
from vllm_fp8ext.serve.client.fleet import Fleet, catch_up, push_to_all
from vllm_fp8ext.serve.client.flow import Endpoint, Flow
from vllm_fp8ext.serve.client.options import ClientPushOptions, ReplicasPushOptions, by_keywords
from vllm_fp8ext.serve.client.part import send
from vllm_fp8ext.serve.client.push import push
from vllm_fp8ext.serve.client.servers import Servers

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")

TIMEOUT = 600.0
RETRIES = 5

_push = by_keywords(push, ClientPushOptions)
_push_to_all = by_keywords(push_to_all, ReplicasPushOptions)


class _Blocking(Generic[S]):
    """Runs flows on whom they are about, a server or several; holds the connections."""

    def __init__(self, subject: S, transport: httpx.BaseTransport | None = None) -> None:
        self._subject = subject
        self._driver = BlockingDriver(transport)

    def close(self) -> None:
        """Close the connections."""
        self._driver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Awaited(Generic[S]):
    """Runs flows as coroutines on whom they are about, a server or several; holds the connections."""

    def __init__(self, subject: S, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._subject = subject
        self._driver = AsyncDriver(transport)

    async def close(self) -> None:
        """Close the connections."""
        await self._driver.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _blocking(flow: Callable[Concatenate[S, P], Flow[T]]) -> Callable[Concatenate[_Blocking[S], P], T]:
    @functools.wraps(flow)
    def method(self: _Blocking[S], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._driver.run(flow(self._subject, *args, **kwargs))

    return method


def _awaited(
    flow: Callable[Concatenate[S, P], Flow[T]],
) -> Callable[Concatenate[_Awaited[S], P], Coroutine[Any, Any, T]]:
    @functools.wraps(flow)
    async def method(self: _Awaited[S], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._driver.run(flow(self._subject, *args, **kwargs))

    return method


class Client(_Blocking[Endpoint]):
    """One server's weights.

    `url`: the server's root (`FP8EXT_URL`, else port 8000 of this machine). `key`: the admin key (`FP8EXT_ADMIN_KEY`).
    `timeout`: seconds without a byte after which a call fails, and from its start, after which it is not begun again.
    `retries`: how often a call that failed is sent again where that is safe.

    Methods raise `UpdateError` when the server refuses, `httpx.HTTPError` when it can't be reached, `ConfigError` when
    a proxy that the environment names can't be used.

    Raises:
        ConfigError: a URL that does not begin with `http://` or `https://`, or a key that is not printable ASCII.
    """

    def __init__(
        self,
        url: str | None = None,
        key: str | None = None,
        *,
        timeout: float = TIMEOUT,
        retries: int = RETRIES,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        super().__init__(Endpoint.of(url, key, timeout=timeout, retries=retries), transport)

    weights = _blocking(calls.weights)
    manifest = _blocking(calls.manifest)
    kv_scales = _blocking(calls.kv_scales)
    digests = _blocking(calls.digests)
    verify = _blocking(calls.verify)
    declare_current = _blocking(calls.declare_current)
    open = _blocking(calls.open)
    update = _blocking(calls.update)
    put_chunk = _blocking(calls.put_chunk)
    files = _blocking(calls.files)
    handles = _blocking(calls.handles)
    receive = _blocking(calls.receive)
    prepare = _blocking(calls.prepare)
    commit = _blocking(calls.commit)
    abandon = _blocking(calls.abandon)
    rollback = _blocking(calls.rollback)
    sleep = _blocking(calls.sleep)
    wake = _blocking(calls.wake)
    load = _blocking(calls.load)
    push = _blocking(_push)
    send = _blocking(send)


class AsyncClient(_Awaited[Endpoint]):
    """`Client` for asyncio: the same methods with the same arguments, to be awaited.

    Files are read, and tensors copied and hashed, in threads. An iterable that is pushed is advanced on the event loop's
    thread.
    """

    def __init__(
        self,
        url: str | None = None,
        key: str | None = None,
        *,
        timeout: float = TIMEOUT,
        retries: int = RETRIES,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        super().__init__(Endpoint.of(url, key, timeout=timeout, retries=retries), transport)

    weights = _awaited(calls.weights)
    manifest = _awaited(calls.manifest)
    kv_scales = _awaited(calls.kv_scales)
    digests = _awaited(calls.digests)
    verify = _awaited(calls.verify)
    declare_current = _awaited(calls.declare_current)
    open = _awaited(calls.open)
    update = _awaited(calls.update)
    put_chunk = _awaited(calls.put_chunk)
    files = _awaited(calls.files)
    handles = _awaited(calls.handles)
    receive = _awaited(calls.receive)
    prepare = _awaited(calls.prepare)
    commit = _awaited(calls.commit)
    abandon = _awaited(calls.abandon)
    rollback = _awaited(calls.rollback)
    sleep = _awaited(calls.sleep)
    wake = _awaited(calls.wake)
    load = _awaited(calls.load)
    push = _awaited(_push)
    send = _awaited(send)


class Replicas(_Blocking[Fleet]):
    """Several servers that are to serve the same weights.

    `servers`: their URLs, or where they are named: `ServersFile`, `ServersDns`. The other arguments are those of `Client`;
    all servers have the same key.
    """

    def __init__(
        self,
        servers: Iterable[str] | Servers,
        key: str | None = None,
        *,
        timeout: float = TIMEOUT,
        retries: int = RETRIES,
    ) -> None:
        super().__init__(Fleet(servers, key, timeout=timeout, retries=retries))

    push = _blocking(_push_to_all)
    catch_up = _blocking(catch_up)


class AsyncReplicas(_Awaited[Fleet]):
    """`Replicas` for asyncio."""

    def __init__(
        self,
        servers: Iterable[str] | Servers,
        key: str | None = None,
        *,
        timeout: float = TIMEOUT,
        retries: int = RETRIES,
    ) -> None:
        super().__init__(Fleet(servers, key, timeout=timeout, retries=retries))

    push = _awaited(_push_to_all)
    catch_up = _awaited(catch_up)
