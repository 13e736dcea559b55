# SPDX-License-Identifier: Apache-2.0
"""A place that a body fills from its start, and the digest so far."""

from vllm_fp8ext.serve.content_digest import ContentDigest

_STEP = 1 << 20
"""Bytes that are worth a thread to be hashed on."""


class BodyBuffer:
    """`content`: the place. `filled`: bytes of the body that are there. `digest`: of them, if one is expected."""

    def __init__(self, content: memoryview, digest: ContentDigest | None) -> None:
        self.content = content
        self.filled = 0
        self.digest = digest
        self._hashed = 0

    @property
    def rest(self) -> memoryview:
        """Memory for the next byte, and those after it."""
        return self.content[self.filled :]

    @property
    def behind(self) -> bool:
        """Return whether it is time to `hash`."""
        return self.digest is not None and self.filled - self._hashed >= _STEP

    def copy(self, piece: bytes) -> None:
        """Take the next piece, which fits."""
        self.content[self.filled : self.filled + len(piece)] = piece
        self.filled += len(piece)

    def took(self, count: int) -> None:
        """So many bytes were put into `rest`."""
        self.filled += count
        self.hash()

    def hash(self) -> None:
        """Bring the digest up to what is there. On any thread."""
        if self.digest is not None:
            self.digest.update(self.content[self._hashed : self.filled])
            self._hashed = self.filled

    def verify(self) -> None:
        """It is complete. On any thread.

        Raises:
            UpdateError: `digest-mismatch`.
        """
        self.hash()
        if self.digest is not None:
            self.digest.verify()
