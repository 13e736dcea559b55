# SPDX-License-Identifier: Apache-2.0
"""Orders the sizes of DeepGEMM's kernels, and shares them out among processes.

Imports neither torch nor vLLM.
"""

import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import BinaryIO, TypeVar

FEATURE: str = "warmup"
WHY: str = "Have processes compile different kernels: DeepGEMM alone knows which sizes share one."
GAIN: str = "see deep_gemm_compile"
REPLACES: tuple[str, ...] = ()
USES: dict[str, tuple[str, ...]] = {}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "`deep_gemm_compile` goes"
GPU_ONLY: bool = True

_RECORD = 64
"""Bytes of a size in the list."""

Sizes = Mapping[tuple[int, ...], Sequence[int]]
"""Token counts by shape of weight `(N, K)`; numbers of rows by shape of experts `(N, K, E)`."""
Size = tuple[int, ...]
"""A count, and its shape."""
T = TypeVar("T")


def ordered(sizes: Sizes) -> list[Size]:
    """Order all sizes, by turns of each shape.

    First come those that divide a shape's counts into halves, then quarters.
    """
    turns = [spread([(count, *shape) for count in sorted(counts)]) for shape, counts in sizes.items()]
    return [size for turn in itertools.zip_longest(*turns) for size in turn if size is not None]


def spread(items: Sequence[T]) -> list[T]:
    """The same ones, each far from those before it: by the reversed bits of their places."""
    bits = max(1, (len(items) - 1).bit_length())
    places = (int(f"{place:0{bits}b}"[::-1], 2) for place in range(1 << bits))
    return [items[place] for place in places if place < len(items)]


def write(listed: BinaryIO, sizes: Sequence[Size]) -> None:
    """Write what processes that share this file `take`."""
    listed.write(b"".join(json.dumps(size).encode().ljust(_RECORD) for size in sizes))
    listed.seek(0)


def take(listed: int) -> Iterator[Size]:
    """Sizes that no other process took: a file that is inherited has one position for all, and each read moves it."""
    while record := os.read(listed, _RECORD):
        yield tuple(json.loads(record))
