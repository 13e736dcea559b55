# SPDX-License-Identifier: Apache-2.0
"""Sends requests over the network: directly, or by the proxy that the environment names for a server.

httpx reads the same variables itself, but takes IPv6 addresses and networks in `NO_PROXY` for ports, raises what is no
`httpx.HTTPError` where a SOCKS proxy can't be used, and names no proxy in its errors.
"""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import httpx

from vllm_fp8ext.errors import ConfigError
from vllm_fp8ext.serve.client.proxies import Proxies, Proxy

T = TypeVar("T")

PROXY = "fp8ext.proxy"
"""Extension of a response that names the proxy by which it came."""
_LIMITS = httpx.Limits(max_connections=None)


class _Transports(Generic[T]):
    """One transport for each proxy, and one without, each made when it is first needed."""

    def __init__(self, make: Callable[[str | None], T]) -> None:
        self.made: dict[str | None, T] = {}
        self._make = make
        self._making = threading.Lock()
        self._proxies = Proxies.of_environment()

    def to(self, url: httpx.URL) -> tuple[T, Proxy | None]:
        """Return the transport for a server, and its proxy.

        Raises:
            ConfigError: the proxy can't be used.
        """
        proxy = self._proxies.of(url)
        name = proxy.url if proxy else None
        with self._making:
            if name not in self.made:
                try:
                    self.made[name] = self._make(name)
                except ImportError:
                    raise ConfigError(
                        f"a SOCKS proxy, {proxy}, needs the package socksio: pip install 'httpx[socks]', "
                        f"or name {url.host} in NO_PROXY"
                    ) from None
                except (ValueError, httpx.InvalidURL) as error:
                    raise ConfigError(
                        f"expected a proxy such as http://proxy:3128, found {proxy}: {error}"
                    ) from None
            return self.made[name], proxy


class Network(httpx.BaseTransport):
    """Sends requests and blocks until they are answered. Errors and answers name the proxy, where there is one."""

    def __init__(self) -> None:
        self._ways = _Transports(lambda proxy: httpx.HTTPTransport(limits=_LIMITS, proxy=proxy))

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request once."""
        transport, proxy = self._ways.to(request.url)
        try:
            return _by(proxy, transport.handle_request(request))
        except httpx.TransportError as error:
            if proxy is None:
                raise
            raise _through(proxy, error) from error

    def close(self) -> None:
        """Close the connections."""
        for transport in self._ways.made.values():
            transport.close()


class AsyncNetwork(httpx.AsyncBaseTransport):
    """Sends requests on an event loop, as `Network` does."""

    def __init__(self) -> None:
        self._ways = _Transports(lambda proxy: httpx.AsyncHTTPTransport(limits=_LIMITS, proxy=proxy))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request once."""
        transport, proxy = self._ways.to(request.url)
        try:
            return _by(proxy, await transport.handle_async_request(request))
        except httpx.TransportError as error:
            if proxy is None:
                raise
            raise _through(proxy, error) from error

    async def aclose(self) -> None:
        """Close the connections."""
        for transport in self._ways.made.values():
            await transport.aclose()


def _by(proxy: Proxy | None, response: httpx.Response) -> httpx.Response:
    if proxy:
        response.extensions[PROXY] = str(proxy)
    return response


def _through(proxy: Proxy, error: httpx.TransportError) -> httpx.TransportError:
    """Return an error of the same type that names the proxy."""
    return type(error)(f"{error or type(error).__name__}, through the proxy {proxy}")
