# SPDX-License-Identifier: Apache-2.0
"""Reads which proxy the environment names for a server: `HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY`."""

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self
from urllib.request import getproxies

import httpx

_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, kw_only=True)
class Proxy:
    """A proxy, and where its name comes from."""

    url: str
    variable: str

    def __str__(self) -> str:
        """Name it without its user and password."""
        scheme, _, rest = self.url.partition("://")
        return f"{scheme}://{rest.rpartition('@')[2].rstrip('/')} (of {self.variable})"


@dataclass(frozen=True, kw_only=True)
class Exemption:
    """One entry of `NO_PROXY`: a host, a domain, an address or a network, with a scheme and a port or without."""

    scheme: str | None
    host: str
    """Empty: any."""
    port: int | None

    @classmethod
    def of(cls, entry: str) -> Self:
        """Take an entry apart: `rollout`, `.cluster.local`, `10.0.0.0/8`, `::1`, `[fd00::1]:8000`, `http://rollout`."""
        scheme, separator, rest = entry.lower().rpartition("://")
        rest = (rest.split("/")[0] if separator else rest).removeprefix("*")
        bare, colon, port = rest.rpartition(":")
        with_port = bool(colon) and port.isdigit() and (":" not in bare or bare.endswith("]"))
        host = bare if with_port else rest
        return cls(
            scheme=scheme if separator and scheme != "all" else None,
            host=host.replace("[", "").replace("]", ""),
            port=int(port) if with_port else None,
        )

    def holds(self, url: httpx.URL) -> bool:
        """Return whether a server is reached past the proxy."""
        if self.scheme not in (None, url.scheme):
            return False
        if self.port not in (None, url.port or _PORTS.get(url.scheme)):
            return False
        if not self.host:
            return True
        network, address = _network(self.host), _network(url.host)
        if network is not None or address is not None:
            return network is not None and address is not None and address.network_address in network
        under = self.host if self.host.startswith(".") else f".{self.host}"
        return url.host == self.host or url.host.endswith(under)


@dataclass(frozen=True, kw_only=True)
class Proxies:
    """Proxies of the environment, by the scheme of their servers (`all`: any)."""

    by_scheme: Mapping[str, Proxy]
    exempt: tuple[Exemption, ...]

    @classmethod
    def of_environment(cls) -> Self:
        """Read the variables, of which one in lower case comes first. Without them, a Mac's settings."""
        variables = getproxies()
        by_scheme = {
            scheme: Proxy(url=url if "://" in url else f"http://{url}", variable=_variable(scheme))
            for scheme in ("http", "https", "all")
            if (url := variables.get(scheme, "").strip())
        }
        entries = variables.get("no", "").replace(",", " ").split()
        return cls(by_scheme=by_scheme, exempt=tuple(map(Exemption.of, entries)))

    def of(self, url: httpx.URL) -> Proxy | None:
        """Return the proxy by which a server is reached; None: directly."""
        if any(exemption.holds(url) for exemption in self.exempt):
            return None
        return self.by_scheme.get(url.scheme) or self.by_scheme.get("all")


def _variable(scheme: str) -> str:
    names = (f"{scheme}_proxy", f"{scheme}_proxy".upper())
    return next((name for name in names if os.environ.get(name)), "the system's settings")


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    """A network, or an address as one; None for a name."""
    try:
        return ipaddress.ip_network(text.partition("%")[0], strict=False)
    except ValueError:
        return None
