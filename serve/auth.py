# SPDX-License-Identifier: Apache-2.0
"""The admin key: `Authorization: Bearer …` against `FP8EXT_ADMIN_KEY`."""

import base64
import binascii
import hashlib
import hmac

from vllm_fp8ext.errors import UpdateError


class AdminKey:
    """Checks a header without telling by its timing how much of the key was right."""

    def __init__(self, key: str) -> None:
        self._digest = hashlib.sha256(key.strip().encode()).digest()

    def check(self, authorization: str | None) -> None:
        """Raises `UpdateError` with status 401 without a key, 403 with a wrong one."""
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise UpdateError(
                "no-key",
                "expected the header 'Authorization: Bearer ADMIN_KEY', found none (the client's FP8EXT_ADMIN_KEY)",
                status=401,
            )
        if not hmac.compare_digest(hashlib.sha256(token.strip().encode()).digest(), self._digest):
            raise UpdateError("wrong-key", "the admin key is wrong (it is not the --api-key)", status=403)

    def matches(self, token: str) -> bool:
        """Tell whether a token is the key."""
        return hmac.compare_digest(hashlib.sha256(token.strip().encode()).digest(), self._digest)


def basic_password(authorization: str | None) -> str | None:
    """Return the password of an `Authorization: Basic` header, or None where there is none."""
    scheme, _, encoded = (authorization or "").partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        _, separator, password = base64.b64decode(encoded.strip(), validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        return None
    return password if separator else None
