# SPDX-License-Identifier: Apache-2.0
"""Compares an update that is opened again with what is pushed now."""

from collections.abc import Iterable, Sequence

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve import schema


def staged_digest(update: schema.Update, n: int, length: int) -> str | None:
    """Return the SHA-256 of chunk `n`, in hexadecimal, if it was staged with this length."""
    known = update.chunks.get(str(n))
    return known.sha256 if known is not None and known.staged and known.bytes == length else None


def require_same(
    committed: Sequence[schema.Update], digests: Sequence[str | None], sha256: bytes | None
) -> None:
    """Raise `other-update` if a committed update has another digest of a chunk."""
    for update, digest in zip(committed, digests, strict=True):
        if sha256 is not None and digest not in (None, sha256.hex()):
            raise UpdateError(
                "other-update",
                f"update {update.id} is committed, with other weights than these: push them without its id",
                expected=digest,
                found=sha256.hex(),
            )


def require_no_others(updates: Iterable[schema.Update], count: int) -> None:
    """Raise `other-update` if an update has more chunks than the `count` pushed now."""
    for update in updates:
        others = [
            key
            for key, chunk in update.chunks.items()
            if key.isdecimal() and int(key) >= count and (chunk.staged or chunk.busy)
        ]
        if others:
            raise UpdateError(
                "other-update",
                f"update {update.id} has chunks of other weights ({', '.join(others[:8])}): these are chunks 0 to "
                f"{count - 1}. Push them without its id",
                expected=count,
                found=others,
            )
