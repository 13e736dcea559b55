# SPDX-License-Identifier: Apache-2.0
"""Cuts safetensors files into smaller ones without decoding a tensor: a header and byte ranges, standard library only."""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PIECE = 1 << 20


@dataclass(frozen=True)
class Range:
    """The bytes of one tensor in a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    size: int


@dataclass(frozen=True)
class Body:
    """A safetensors body made of ranges: its length is known before it is read."""

    ranges: tuple[Range, ...]

    @property
    def header(self) -> bytes:
        entries: dict[str, Any] = {}
        offset = 0
        for part in self.ranges:
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
    def length(self) -> int:
        return len(self.header) + sum(part.size for part in self.ranges)

    def read(self) -> Iterator[bytes]:
        """The body, in pieces of at most 1 MiB."""
        yield self.header
        for part in self.ranges:
            with part.file.open("rb") as file:
                file.seek(part.start)
                left = part.size
                while left:
                    piece = file.read(min(left, _PIECE))
                    if not piece:
                        raise ValueError(f"{part.file}: ends in the middle of {part.name}")
                    left -= len(piece)
                    yield piece


def ranges_of(checkpoint: Path) -> list[Range]:
    """Every tensor of a safetensors file, or of all of them in a folder.

    Raises:
        ValueError: no such file, or one that is not safetensors.
    """
    files = sorted(checkpoint.glob("*.safetensors")) if checkpoint.is_dir() else [checkpoint]
    if not files or not all(file.is_file() for file in files):
        raise ValueError(f"{checkpoint}: expected *.safetensors, found none")
    return [part for file in files for part in _ranges(file)]


def bodies(ranges: list[Range], limit: int) -> list[Body]:
    """Bodies of about `limit` bytes at most, in order; a larger tensor travels alone."""
    groups: list[list[Range]] = [[]]
    size = 0
    for part in ranges:
        if groups[-1] and size + part.size > limit:
            groups.append([])
            size = 0
        groups[-1].append(part)
        size += part.size
    return [Body(tuple(group)) for group in groups if group]


def _ranges(file: Path) -> list[Range]:
    try:
        with file.open("rb") as reader:
            (length,) = struct.unpack("<Q", reader.read(8))
            if length > file.stat().st_size:
                raise ValueError("its header is longer than the file")
            header = json.loads(reader.read(length))
        return [
            Range(
                name,
                entry["dtype"],
                tuple(entry["shape"]),
                file,
                8 + length + entry["data_offsets"][0],
                entry["data_offsets"][1] - entry["data_offsets"][0],
            )
            for name, entry in header.items()
            if name != "__metadata__"
        ]
    except (struct.error, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"{file}: not a safetensors file: {error}") from None
