# SPDX-License-Identifier: Apache-2.0
"""Tensors of a file, read ahead of whoever takes them, through a few buffers that are used again and again.

The file is cut into spans, each of which fits a buffer: neighbouring tensors together, a larger tensor as ranges of rows; or
stretches of bytes, as they are. A thread fills one buffer at a time. So reading never waits for the end of a tensor, page
faults and page-locking happen once, and memory is bounded whatever the size of a tensor.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from vllm_fp8ext.kernels.numerics.reference import BLOCK
from vllm_fp8ext.update.contract.safetensors_header import StoredTensor

READERS = 4
"""Threads that read, for each rank."""
READ_BYTES = 8 << 20
"""What one of them reads at a time: the size of a buffer."""
BUFFERS = 8
"""For each rank: the readers', one that is staged, and as many whose copies are under way or that are full already. Together
they stay in the processor's cache: with three times as much the same files take a fifth longer."""

Fill = Callable[[memoryview, int], None]
"""`fill(buffer, start)`: fill all of a buffer with what the file has from byte `start` on."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a stored tensor, indices of its first dimension, from `first` on; a scalar has one. `values`: `[rows, …]`."""

    stored: StoredTensor
    first: int
    values: Tensor

    @property
    def last(self) -> bool:
        """Whether the tensor ends with them."""
        shape = self.stored.spec.shape
        return not shape or self.first + self.values.shape[0] == shape[0]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Bytes `start` to `stop` of a file or body that go as they are to places from `at` on."""

    start: int
    stop: int
    at: int


@dataclass(frozen=True, slots=True)
class Raw:
    """Bytes of a stretch that go to places from `at` on, uint8."""

    at: int
    values: Tensor


Wanted: TypeAlias = StoredTensor | Stretch
"""What is read, as `Rows` or `Raw`."""


@dataclass(frozen=True, slots=True)
class Extent:
    """`count` rows of a tensor, or bytes of a stretch, from `first` on: bytes `start` to `stop` of the file."""

    of: Wanted
    first: int
    count: int
    start: int
    stop: int


def extents(of: Wanted, room: int) -> list[Extent]:
    """Ranges of at most `room` bytes. A tensor's are of rows; those of a matrix begin at multiples of 128, as its blocks
    do. What can't be cut so far (128 rows of a matrix, one of anything else) may be larger."""
    if isinstance(of, Stretch):
        starts = range(of.start, of.stop, room)
        return [
            Extent(of, first - of.start, last - first, first, last)
            for first, last in pairwise([*starts, of.stop])
        ]
    return _row_extents(of, room)


def _row_extents(stored: StoredTensor, room: int) -> list[Extent]:
    shape = stored.spec.shape
    rows = shape[0] if shape else 1
    if stored.size <= room:
        return [Extent(stored, 0, rows, stored.start, stored.start + stored.size)]
    row = stored.size // rows
    unit = BLOCK if len(shape) == 2 else 1
    step = max(unit, room // row // unit * unit)
    bounds = [*range(0, rows, step), rows]
    return [
        Extent(stored, first, last - first, stored.start + first * row, stored.start + last * row)
        for first, last in pairwise(bounds)
    ]


def spans(wanted: Iterable[Wanted], room: int) -> Iterator[list[Extent]]:
    """What is wanted, in this order, as bytes to read together: at most `room` without a hole, unless one extent has more;
    with each extent of a tensor aligned to its elements, counted from the first."""
    span: list[Extent] = []
    for extent in (extent for of in wanted for extent in extents(of, room)):
        if span:
            begin = span[0].start
            item = extent.of.spec.torch_dtype.itemsize if isinstance(extent.of, StoredTensor) else 1
            adjoins = span[-1].stop == extent.start
            if not adjoins or extent.stop - begin > room or (extent.start - begin) % item:
                yield span
                span = []
        span.append(extent)
    if span:
        yield span


class _Buffer:
    """Memory that one span after the other is read into; page-locked for a GPU."""

    def __init__(self, size: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._raw = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu)
        self._bytes = memoryview(self._raw.numpy())
        self._copied = torch.cuda.Event(blocking=True) if on_gpu else None

    def filled(self, span: Sequence[Extent], fill: Fill) -> Tensor:
        """A span's bytes, read once the copies of what was here before are done."""
        if self._copied is not None:
            self._copied.synchronize()
        start, size = span[0].start, span[-1].stop - span[0].start
        if size > len(self._bytes):
            raw = torch.empty(size, dtype=torch.uint8)
            fill(memoryview(raw.numpy()), start)
            return raw
        fill(self._bytes[:size], start)
        return self._raw[:size] if size < len(self._bytes) else self._raw

    def release(self) -> None:
        """What was to be copied from here is queued on the current stream."""
        if self._copied is not None:
            self._copied.record()


class ReadAhead:
    """Reading threads, and buffers of `size` bytes each, kept: for a rank `BUFFERS` times `READ_BYTES`, 64 MiB of host
    memory. Extents that are larger have memory of their own while they are read."""

    def __init__(self, device: torch.device, readers: int, buffers: int, size: int) -> None:
        self._size = size
        self._buffers = [_Buffer(size, device) for _ in range(buffers)]

        def on_device() -> None:
            # a thread that waits for an event must not open a context on the first GPU
            if device.type == "cuda":
                torch.cuda.set_device(device)

        self._readers = ThreadPoolExecutor(readers, "fp8ext-read", initializer=on_device)

    def read(self, wanted: Iterable[Wanted], fill: Fill) -> Generator[Rows | Raw, None, None]:
        """All of this, in this order; one reading at a time. Parts are valid until the next are taken: what is to be copied
        from them to a GPU must be queued on the current stream by then.

        What `fill` raises is raised in the place of the parts that it was called for. When the iterator is closed or has
        raised, no thread reads any more.
        """
        coming = spans(wanted, self._size)
        ahead: deque[tuple[_Buffer, list[Extent], Future[Tensor]]] = deque()

        def begin(buffer: _Buffer) -> None:
            for span in islice(coming, 1):
                ahead.append((buffer, span, self._readers.submit(buffer.filled, span, fill)))

        try:
            for buffer in self._buffers:
                begin(buffer)
            while ahead:
                buffer, span, reading = ahead[0]
                raw, start, alone = reading.result(), span[0].start, len(span) == 1
                try:
                    for extent in span:
                        yield _part(extent, raw if alone else raw[extent.start - start : extent.stop - start])
                finally:
                    buffer.release()
                ahead.popleft()
                begin(buffer)
        finally:
            for _, _, reading in ahead:
                reading.cancel()
            wait([reading for _, _, reading in ahead])


def _part(extent: Extent, raw: Tensor) -> Rows | Raw:
    if isinstance(extent.of, Stretch):
        return Raw(extent.of.at + extent.first, raw)
    spec = extent.of.spec
    shape = (extent.count, *spec.shape[1:]) if spec.shape else ()
    return Rows(extent.of, extent.first, raw.view(spec.torch_dtype).view(shape))
