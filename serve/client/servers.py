# SPDX-License-Identifier: Apache-2.0
"""Places that name the servers of `Replicas`: a list, a file, DNS. They are looked at anew for each update."""

import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from vllm_fp8ext.errors import ConfigError, UpdateError

_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class ServerAddress:
    """URL of a server's root. `host`: its name and port, where the URL has an IP address instead."""

    url: str
    host: str | None = None


class Servers(Protocol):
    """A place that names servers."""

    @property
    def fixed(self) -> bool:
        """True where the same servers are named each time. Each of them has to be there then."""

    def addresses(self) -> list[ServerAddress]:
        """Look which servers there are now.

        Raises:
            ValueError: what is found there names no servers.
            UpdateError: `no-servers`: it can't be looked at, or names none now.
        """


class ServersList:
    """URLs that stay the same."""

    fixed = True

    def __init__(self, urls: Iterable[str]) -> None:
        if isinstance(urls, str):
            raise ValueError(f"expected the URLs of several servers, found one text, {urls!r}")
        self._urls = tuple(urls)

    def addresses(self) -> list[ServerAddress]:
        """Return the URLs."""
        return [ServerAddress(url) for url in self._urls]


class ServersFile:
    """A text file with a URL in each line, which is read for each update. What follows a `#` is a comment.

    Whoever changes it writes another file and renames it, so that nobody reads half of it.
    """

    fixed = False

    def __init__(self, path: str | PathLike[str]) -> None:
        self._path = Path(os.path.abspath(path))

    def addresses(self) -> list[ServerAddress]:
        """Read the file."""
        try:
            lines = self._path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise UpdateError("no-servers", f"{self._path}: {error.strerror}", status=503) from error
        urls = [url for line in lines if (url := line.partition("#")[0].strip())]
        for number, url in enumerate(urls, 1):
            if any(map(str.isspace, url)) or not url.lower().startswith(("http://", "https://")):
                raise ValueError(
                    f"{self._path}: expected a URL such as http://rollout-0:8000, found {url!r} ({number})"
                )
        if not urls:
            raise UpdateError("no-servers", f"{self._path} names no server", status=503)
        return [ServerAddress(url) for url in dict.fromkeys(urls)]


class ServersDns:
    """A URL whose host name has an address for each server.

    A headless service of Kubernetes is such a name. It is resolved for each update.

    Certificates are compared with the name. Where the name has addresses of both kinds, IPv4 is taken: both would be the same
    servers.

    Raises:
        ConfigError: a URL without a scheme, or with a user: the key is an argument of `Replicas`.
    """

    fixed = False

    def __init__(self, url: str) -> None:
        parts = urlsplit(url.rstrip("/"))
        if parts.scheme.lower() not in _PORTS or not parts.hostname or parts.username is not None:
            where = url.rpartition("@")[2]
            raise ConfigError(f"expected a URL such as http://rollouts:8000, without a user, found {where}")
        self._scheme, self._name, self._path = parts.scheme.lower(), parts.hostname, parts.path
        self._port = parts.port or _PORTS[self._scheme]

    def addresses(self) -> list[ServerAddress]:
        """Resolve the name."""
        try:
            resolved = socket.getaddrinfo(self._name, self._port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise UpdateError(
                "no-servers", f"{self._name} can't be resolved: {error.strerror}", status=503
            ) from error
        by_family: dict[int, set[str]] = {}
        for family, _, _, _, place in resolved:
            by_family.setdefault(family, set()).add(str(place[0]))
        addresses = sorted(by_family.get(socket.AF_INET) or by_family.get(socket.AF_INET6) or ())
        if not addresses:
            raise UpdateError("no-servers", f"{self._name} has no address", status=503)
        return [self._address(address) for address in addresses]

    def _address(self, address: str) -> ServerAddress:
        at = f"[{address}]" if ":" in address else address
        return ServerAddress(f"{self._scheme}://{at}:{self._port}{self._path}", f"{self._name}:{self._port}")
