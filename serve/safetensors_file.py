# SPDX-License-Identifier: Apache-2.0
"""The tensors of safetensors files as byte ranges: none is decoded, none is read before it is sent. Needs neither torch
nor vLLM."""

from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve import safetensors_body
from vllm_fp8ext.serve.tensors import DTYPES
from vllm_fp8ext.update.contract.file_versions import Snapshot, opened_version
from vllm_fp8ext.update.contract.manifest import scales_beside
from vllm_fp8ext.update.contract.regular_file import Stamp
from vllm_fp8ext.update.contract.safetensors_header import StoredTensor, file_tensors


@dataclass(frozen=True)
class Range:
    """The bytes of one tensor in a file: `size` of them from `start` on. A part of a body. `stamp`: the file's version, if
    only that one will do."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    size: int
    stamp: Stamp | None = None

    def fetched(self) -> "Range":
        """Itself: a file can be read again."""
        return self

    def pieces(self) -> Iterator[bytes]:
        """Its bytes.

        Raises:
            UpdateError: `file-changed`: the file is of another version.
            ValueError: it is shorter.
        """
        with opened_version(self.file, self.stamp) if self.stamp else self.file.open("rb") as file:
            file.seek(self.start)
            left = self.size
            while left:
                piece = file.read(min(left, safetensors_body.PIECE))
                if not piece:
                    raise ValueError(f"{self.file}: ends in the middle of {self.name}")
                left -= len(piece)
                yield piece


def ranges_of(checkpoint: Path) -> list[Range]:
    """Return every tensor of a safetensors file, or of a checkpoint's files in a folder. Scales come beside their weights.

    Raises:
        ValueError: no such file, or one that is not safetensors.
    """
    return snapshot_ranges(checkpoint)[1]


def snapshot_ranges(checkpoint: Path) -> tuple[Snapshot, list[Range]]:
    """The same, and what tells whether all of them are still there.

    Raises:
        ValueError: as `ranges_of`.
    """
    try:
        snapshot = Snapshot.of(checkpoint)
        ranges = [
            _range(file, snapshot.stamps[file], stored)
            for file in snapshot.files
            for stored in file_tensors(file)
        ]
        snapshot.require_unchanged()
    except UpdateError as error:
        raise ValueError(str(error)) from None
    return snapshot, scales_beside(ranges, attrgetter("name"))


def _range(file: Path, stamp: Stamp, stored: StoredTensor) -> Range:
    spec = stored.spec
    dtype = DTYPES.get(spec.dtype, spec.dtype)  # those that no update may have keep safetensors' names
    return Range(spec.name, dtype, spec.shape, file, stored.start, stored.size, stamp)
