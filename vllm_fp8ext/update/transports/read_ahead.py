# SPDX-License-Identifier: Apache-2.0
"""Reads tensors of a file ahead of their consumer, through a few buffers.

The file is cut into spans, each of which fits a buffer: neighbouring tensors together, a larger tensor as ranges of rows; or
ranges of bytes, as they are. A thread fills one buffer at a time. So reading never waits for the end of a tensor, page faults
and page-locking happen once, and memory is bounded whatever the size of a tensor.
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
"""Reading threads of each rank."""
READ_BYTES = 8 << 20
"""Bytes that a thread reads at a time: the size of a buffer."""
BUFFERS = 8
"""Buffers of each rank.

The readers have one each, one is staged, and the copies of the others are under way, or they are full already. Together they
stay in the processor's cache: with three times as much the same files take a fifth longer.
"""

Fill = Callable[[memoryview, int], None]
"""Fills all of a buffer with what the file has from byte `start` on: `fill(buffer, start)`."""


@dataclass(frozen=True, slots=True)
class TensorRows:
    """Rows of a stored tensor, indices of its first dimension, from `first` on; a scalar has one.

    `values`: `[rows, …]`.
    """

    stored: StoredTensor
    first: int
    values: Tensor

    @property
    def last(self) -> bool:
        """True if the tensor ends with these rows."""
        shape = self.stored.spec.shape
        return not shape or self.first + self.values.shape[0] == shape[0]


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes `start` to `stop` of a file or body, for a buffer from `destination` on."""

    start: int
    stop: int
    destination: int


@dataclass(frozen=True, slots=True)
class RawBytes:
    """Bytes of a range, uint8, for byte `destination` of a buffer and those after it."""

    destination: int
    values: Tensor


ReadItem: TypeAlias = StoredTensor | ByteRange
"""A tensor, read as `TensorRows`, or a range of bytes, read as `RawBytes`."""


@dataclass(frozen=True, slots=True)
class ReadRange:
    """A part of an item: `count` rows of a tensor, or bytes of a range, from `first` on.

    They are bytes `start` to `stop` of the file.
    """

    item: ReadItem
    first: int
    count: int
    start: int
    stop: int


def ranges_of(item: ReadItem, limit: int) -> list[ReadRange]:
    """Cut an item into ranges of at most `limit` bytes.

    A tensor's are of rows; those of a matrix begin at multiples of 128, as its blocks do. What can't be cut so far (128 rows
    of a matrix, one of anything else) may be larger.
    """
    if isinstance(item, ByteRange):
        starts = range(item.start, item.stop, limit)
        return [
            ReadRange(item, first - item.start, last - first, first, last)
            for first, last in pairwise([*starts, item.stop])
        ]
    return _row_ranges(item, limit)


def _row_ranges(stored: StoredTensor, limit: int) -> list[ReadRange]:
    shape = stored.spec.shape
    rows = shape[0] if shape else 1
    if stored.size <= limit:
        return [ReadRange(stored, 0, rows, stored.start, stored.start + stored.size)]
    row = stored.size // rows
    unit = BLOCK if len(shape) == 2 else 1
    step = max(unit, limit // row // unit * unit)
    bounds = [*range(0, rows, step), rows]
    return [
        ReadRange(stored, first, last - first, stored.start + first * row, stored.start + last * row)
        for first, last in pairwise(bounds)
    ]


def read_spans(items: Iterable[ReadItem], limit: int) -> Iterator[list[ReadRange]]:
    """Yield spans: ranges of these items, in this order, that are read together.

    A span has at most `limit` bytes and no hole, unless one range has more. Each range of a tensor is aligned to its
    elements, counted from the begin of the span.
    """
    span: list[ReadRange] = []
    for part in (part for item in items for part in ranges_of(item, limit)):
        if span:
            begin = span[0].start
            itemsize = part.item.spec.torch_dtype.itemsize if isinstance(part.item, StoredTensor) else 1
            adjoins = span[-1].stop == part.start
            if not adjoins or part.stop - begin > limit or (part.start - begin) % itemsize:
                yield span
                span = []
        span.append(part)
    if span:
        yield span


class _Buffer:
    """Memory into which one span after the other is read; page-locked for a GPU."""

    def __init__(self, size: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._raw = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu)
        self._bytes = memoryview(self._raw.numpy())
        self._copied = torch.cuda.Event(blocking=True) if on_gpu else None

    def read(self, span: Sequence[ReadRange], fill: Fill) -> Tensor:
        """Read a span's bytes, once the copies of what was here before are done."""
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
        """Let the buffer be used again, once queued copies of the current stream are done."""
        if self._copied is not None:
            self._copied.record()


class ReadAhead:
    """Keeps reading threads, and buffers of `size` bytes each: for a rank 64 MiB of host memory.

    Ranges that are larger have memory of their own while they are read.
    """

    def __init__(self, device: torch.device, readers: int, buffers: int, size: int) -> None:
        self._size = size
        self._buffers = [_Buffer(size, device) for _ in range(buffers)]

        def on_device() -> None:
            # a thread that waits for an event must not open a context on the first GPU
            if device.type == "cuda":
                torch.cuda.set_device(device)

        self._readers = ThreadPoolExecutor(readers, "fp8ext-read", initializer=on_device)

    def read(self, items: Iterable[ReadItem], fill: Fill) -> Generator[TensorRows | RawBytes, None, None]:
        """Yield all of these items, in this order; one reading at a time.

        Parts are valid until the next are taken: what is to be copied from them to a GPU must be queued on the current stream
        by then. What `fill` raises is raised in the place of the parts that it was called for. When the iterator is closed or
        has raised, no thread reads any more.
        """
        spans = read_spans(items, self._size)
        ahead: deque[tuple[_Buffer, list[ReadRange], Future[Tensor]]] = deque()

        def begin(buffer: _Buffer) -> None:
            for span in islice(spans, 1):
                ahead.append((buffer, span, self._readers.submit(buffer.read, span, fill)))

        try:
            for buffer in self._buffers:
                begin(buffer)
            while ahead:
                buffer, span, reading = ahead[0]
                raw, start, alone = reading.result(), span[0].start, len(span) == 1
                try:
                    for part in span:
                        yield _read_part(part, raw if alone else raw[part.start - start : part.stop - start])
                finally:
                    buffer.release()
                ahead.popleft()
                begin(buffer)
        finally:
            for _, _, reading in ahead:
                reading.cancel()
            wait([reading for _, _, reading in ahead])


def _read_part(part: ReadRange, raw: Tensor) -> TensorRows | RawBytes:
    if isinstance(part.item, ByteRange):
        return RawBytes(part.item.destination + part.first, raw)
    spec = part.item.spec
    shape = (part.count, *spec.shape[1:]) if spec.shape else ()
    return TensorRows(part.item, part.first, raw.view(spec.torch_dtype).view(shape))
