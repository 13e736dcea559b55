# SPDX-License-Identifier: Apache-2.0
"""Safetensors bodies made of parts that know their size before they are read. Needs neither torch nor vLLM."""

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from vllm_fp8ext.update.contract.manifest import follows

PIECE = 1 << 20
"""Largest piece in which a body is read, in bytes."""
Piece: TypeAlias = bytes | memoryview


class BodyPart(Protocol):
    """One tensor of a body. `dtype` is safetensors' name for it, `size` its bytes."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def size(self) -> int: ...

    def fetched(self) -> "BodyPart":
        """The same part where it can be read again and again: in host memory, or in a file."""
        ...

    def pieces(self) -> Iterator[Piece]:
        """Its bytes, from the first, in pieces of at most `PIECE` bytes; views where they lie in memory."""
        ...


@dataclass(frozen=True)
class SafetensorsBody:
    """A safetensors body: a header, then its parts without gaps. Iterating reads it from the start, each time."""

    parts: tuple[BodyPart, ...]

    @property
    def header(self) -> bytes:
        """Length and JSON, padded so that the tensors start at a multiple of eight bytes."""
        entries: dict[str, Any] = {}
        offset = 0
        for part in self.parts:
            entries[part.name] = {
                "dtype": part.dtype,
                "shape": list(part.shape),
                "data_offsets": [offset, offset + part.size],
            }
            offset += part.size
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text

    @property
    def size(self) -> int:
        """Bytes of the tensors."""
        return sum(part.size for part in self.parts)

    @property
    def length(self) -> int:
        """Bytes of the whole body."""
        return len(self.header) + self.size

    def __iter__(self) -> Iterator[bytes]:
        return map(bytes, self._pieces())

    def fetched(self) -> "SafetensorsBody":
        """The same body, all of it where it can be read again and again."""
        return SafetensorsBody(tuple(part.fetched() for part in self.parts))

    def sha256(self) -> bytes:
        """SHA-256 of the whole body."""
        digest = hashlib.sha256()
        for piece in self._pieces():
            digest.update(piece)
        return digest.digest()

    def _pieces(self) -> Iterator[Piece]:
        yield self.header
        for part in self.parts:
            yield from part.pieces()


class BodyBuilder:
    """Parts on their way into bodies of `limit` bytes of tensors at most, in order; a larger tensor travels alone. Block
    scales that come right after their weight go where it goes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._names: set[str] = set()
        self._group: list[BodyPart] = []
        self._size = 0

    def add(self, part: BodyPart) -> SafetensorsBody | None:
        """Take the next part; the body that is complete, if this part begins another one.

        Raises:
            ValueError: a name that comes twice.
        """
        if part.name in self._names:
            raise ValueError(f"tensor {part.name}: expected once, found twice")
        self._names.add(part.name)
        full = self._size + part.size > self._limit
        complete = (
            self.rest() if self._group and full and not follows(part.name, self._group[-1].name) else None
        )
        self._group.append(part)
        self._size += part.size
        return complete

    def rest(self) -> SafetensorsBody | None:
        """The body of what is left, if anything is."""
        group, self._group, self._size = self._group, [], 0
        return SafetensorsBody(tuple(group)) if group else None


def bodies(parts: Iterable[BodyPart], limit: int) -> Iterator[SafetensorsBody]:
    """Yield the bodies that these parts make (`BodyBuilder`).

    Raises:
        ValueError: a name that comes twice.
    """
    filling = BodyBuilder(limit)
    for part in parts:
        if complete := filling.add(part):
            yield complete
    if rest := filling.rest():
        yield rest
