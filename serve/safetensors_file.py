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
from vllm_fp8ext.weights.checkpoint_files import checkpoint_files
from vllm_fp8ext.weights.manifest import scales_beside
from vllm_fp8ext.weights.safetensors_header import StoredTensor, file_tensors


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
    """Every tensor of a safetensors file, or of those that make the checkpoint in a folder, scales beside their weights.

    Raises:
        ValueError: no such file, or one that is not safetensors.
    """
    try:
        files = checkpoint_files(checkpoint)
        found = [_range(file, stored) for file in files for stored in file_tensors(file)]
    except UpdateError as error:
        raise ValueError(str(error)) from None
    return scales_beside(found, attrgetter("name"))


def _range(file: Path, stored: StoredTensor) -> Range:
    spec = stored.spec
    dtype = DTYPES.get(spec.dtype, spec.dtype)  # those that no update may have keep safetensors' names
    return Range(spec.name, dtype, spec.shape, file, stored.start, stored.size)
