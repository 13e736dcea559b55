# SPDX-License-Identifier: Apache-2.0
"""`Content-Digest` of a request body (RFC 9530), computed as it arrives."""

import base64
import binascii
import hashlib
import re

from vllm_fp8ext.errors import UpdateError

_ALGORITHMS = {"sha-256": hashlib.sha256, "sha-512": hashlib.sha512}
_MEMBER = re.compile(r"\s*([a-z0-9*_.-]+)=:([A-Za-z0-9+/=]*):\s*(?:;[^,]*)?")


class ContentDigest:
    """The digests that a body must have."""

    def __init__(self, expected: dict[str, bytes]) -> None:
        self._expected = expected
        self._hashes = {name: _ALGORITHMS[name]() for name in expected}

    @classmethod
    def parse(cls, header: str | None) -> "ContentDigest | None":
        """The digests that a header names; None without a header.

        Raises:
            UpdateError: `invalid-digest`: malformed, or no algorithm in it that is known (sha-256, sha-512).
        """
        if header is None:
            return None
        digests: dict[str, bytes] = {}
        for member in header.split(","):
            match = _MEMBER.fullmatch(member)
            if match is None:
                raise _invalid(f"expected 'sha-256=:BASE64:', found {header!r:.200}")
            name, value = match.groups()
            if name in _ALGORITHMS:
                try:
                    digests[name] = base64.b64decode(value, validate=True)
                except binascii.Error as error:
                    raise _invalid(f"{name}: {error}") from None
        if not digests:
            raise _invalid(f"expected sha-256 or sha-512, found {header!r:.200}")
        return cls(digests)

    @property
    def sha256(self) -> str | None:
        """The SHA-256 that the body must have, in hexadecimal, if the header named one."""
        digest = self._expected.get("sha-256")
        return None if digest is None else digest.hex()

    def update(self, piece: memoryview) -> None:
        """Take the next bytes of the body."""
        for running in self._hashes.values():
            running.update(piece)

    def verify(self) -> None:
        """The body is complete.

        Raises:
            UpdateError: `digest-mismatch` with the digests that were expected and found.
        """
        for name, expected in self._expected.items():
            digest = self._hashes[name].digest()
            if digest != expected:
                raise UpdateError(
                    "digest-mismatch",
                    f"the body's {name} should be {_text(expected)}, found {_text(digest)}",
                    status=400,
                    expected=_text(expected),
                    found=_text(digest),
                )


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _invalid(message: str) -> UpdateError:
    return UpdateError("invalid-digest", f"Content-Digest: {message}", status=400)
