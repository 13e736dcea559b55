# SPDX-License-Identifier: Apache-2.0
"""Who may call vLLM's own weight routes: the admin key, or an address that the operator trusts."""

import ipaddress
import logging
from collections.abc import Sequence

from starlette.requests import HTTPConnection

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.auth import AdminKey, basic_password

logger = logging.getLogger("vllm.fp8ext")

_PROXY_HEADERS = ("forwarded", "via", "origin")
_PROXY_PREFIX = "x-forwarded-"


class NativeAccess:
    """Checks callers; `trusted`: addresses or ranges, none until the settings are known."""

    def __init__(self, key: AdminKey | None) -> None:
        self._key = key
        self._trusted: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []

    def trust(self, ranges: Sequence[str]) -> None:
        """Let these addresses call without a key, and say so."""
        self._trusted = [ipaddress.ip_network(text) for text in ranges]
        if ranges:
            logger.warning(
                "fp8ext: vLLM's weight routes need no key from %s (the setting trusted_clients)",
                ", ".join(ranges),
            )

    @property
    def possible(self) -> bool:
        """Tell whether anybody may call."""
        return self._key is not None or bool(self._trusted)

    def check(self, connection: HTTPConnection) -> None:
        """Require that this caller may.

        Raises:
            UpdateError: `no-key` (401), `wrong-key` or `not-trusted` (403).
        """
        authorization = connection.headers.get("authorization")
        if authorization is not None and self._key is not None:
            password = basic_password(authorization)
            self._key.check(authorization if password is None else f"Bearer {password}")
            return
        if self._trusts(connection):
            return
        if self._key is None:
            message = "nobody may call this: the server has no FP8EXT_ADMIN_KEY, and its trusted_clients name others"
            raise UpdateError("not-trusted", message, status=403)
        self._key.check(None)

    def _trusts(self, connection: HTTPConnection) -> bool:
        """Tell whether the socket's own peer is trusted, and nobody speaks through it.

        Raises:
            UpdateError: `not-trusted`, for a trusted address behind which there is somebody else.
        """
        if not self._trusted or connection.client is None:
            return False
        headers = sorted({name.lower() for name in connection.headers if _of_a_proxy(name.lower())})
        if headers:
            message = (
                f"trusted_clients trusts no request with the headers {', '.join(headers)}: they may come from a browser or "
                "through a proxy; send the admin key"
            )
            raise UpdateError("not-trusted", message, status=403)
        try:
            address = ipaddress.ip_address(connection.client.host)
        except ValueError:
            return False
        mapped = getattr(address, "ipv4_mapped", None)
        return any((mapped or address) in network for network in self._trusted)


def _of_a_proxy(name: str) -> bool:
    return name in _PROXY_HEADERS or name.startswith(_PROXY_PREFIX)
