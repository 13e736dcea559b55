# SPDX-License-Identifier: Apache-2.0
"""The tensors of safetensors files as byte ranges: none is decoded, none is read before it is sent. Needs neither torch
nor vLLM."""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vllm_fp8ext.serve import safetensors_body
from vllm_fp8ext.weights.manifest import SCALES, scale_name


@dataclass(frozen=True)
class Range:
    """The bytes of one tensor in a file: `size` of them from `start` on. A part of a body."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    size: int

    def fetched(self) -> "Range":
        """Itself: a file can be read again."""
        return self

    def pieces(self) -> Iterator[bytes]:
        """Its bytes.

        Raises:
            ValueError: the file has become shorter.
        """
        with self.file.open("rb") as file:
            file.seek(self.start)
            left = self.size
            while left:
                piece = file.read(min(left, safetensors_body.PIECE))
                if not piece:
                    raise ValueError(f"{self.file}: ends in the middle of {self.name}")
                left -= len(piece)
                yield piece


def ranges_of(checkpoint: Path) -> list[Range]:
    """Every tensor of a safetensors file, or of all of them in a folder.

    Raises:
        ValueError: no such file, one that is not safetensors, or one of another size than its header says.
    """
    if not checkpoint.exists():
        raise ValueError(f"{checkpoint}: expected a folder or a file of safetensors, found none of that name")
    files = sorted(checkpoint.glob("*.safetensors")) if checkpoint.is_dir() else [checkpoint]
    if not files or not all(file.is_file() for file in files):
        raise ValueError(f"{checkpoint}: expected *.safetensors, found none")
    return _beside([part for file in files for part in _ranges(file)])


def _beside(ranges: list[Range]) -> list[Range]:
    """The same, with the block scales of a weight right after it."""
    names = {part.name for part in ranges}
    scales: dict[str, list[Range]] = {}
    others = []
    for part in ranges:
        if part.name.endswith(SCALES) and part.name.removesuffix(SCALES) in names:
            scales.setdefault(part.name, []).append(part)
        else:
            others.append(part)
    return [found for part in others for found in (part, *scales.pop(scale_name(part.name), ()))]


def _ranges(file: Path) -> list[Range]:
    size = file.stat().st_size
    try:
        with file.open("rb") as reader:
            (length,) = struct.unpack("<Q", reader.read(8))
            if length > size - 8:
                raise ValueError("its header is longer than the file")
            header = json.loads(reader.read(length))
        ranges = [
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
        expected = max((part.start + part.size for part in ranges), default=8 + length)
        if any(part.start < 8 + length or part.size < 0 for part in ranges):
            raise ValueError("offsets that lie outside of it")
    except (struct.error, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"{file}: not a safetensors file: {error}") from None
    if size != expected:
        raise ValueError(f"{file}: expected {expected} bytes, as its header says, found {size}")
    return ranges
