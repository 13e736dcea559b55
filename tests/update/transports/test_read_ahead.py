# SPDX-License-Identifier: Apache-2.0
"""Reading ahead: every row once, in order, through buffers that are used again; failures, and ends in the middle."""

import threading
import time
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_fp8ext.kernels.numerics.reference import BLOCK
from vllm_fp8ext.update.contract.manifest import TensorSpec
from vllm_fp8ext.update.contract.safetensors_header import StoredTensor
from vllm_fp8ext.update.transports.read_ahead import ReadAhead, ReadRange, TensorRows, ranges_of, read_spans

CPU = torch.device("cpu")
SIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1}


@st.composite
def files(draw: st.DrawFn) -> list[StoredTensor]:
    """Tensors of a file, which may leave holes and need not be aligned."""
    collected: list[StoredTensor] = []
    position = draw(st.integers(0, 9))
    for index in range(draw(st.integers(0, 8))):
        dtype = draw(st.sampled_from(sorted(SIZES)))
        shape = draw(
            st.one_of(
                st.just(()),
                st.tuples(st.integers(0, 900)),
                st.tuples(st.integers(0, 600), st.integers(0, 6)),
                st.tuples(st.integers(0, 9), st.integers(1, 30), st.integers(1, 9)),
            )
        )
        size = torch.Size(shape).numel() * SIZES[dtype]
        collected.append(StoredTensor(TensorSpec(f"w{index}", shape, dtype), position, size))
        position += size + draw(st.sampled_from((0, 0, 0, 1, 50)))
    return collected


def content(tensors: list[StoredTensor]) -> bytes:
    size = max((stored.start + stored.size for stored in tensors), default=0)
    return torch.randint(256, (size,), generator=torch.Generator().manual_seed(0)).byte().numpy().tobytes()


def raw(rows: TensorRows) -> bytes:
    return rows.values.reshape(-1).view(torch.uint8).numpy().tobytes()


@given(files(), st.integers(1, 3000), st.integers(1, 5), st.integers(1, 4), st.data())
@settings(max_examples=150)
def test_all_rows_come_once_in_order(
    tensors: list[StoredTensor], size: int, buffers: int, readers: int, data: st.DataObject
) -> None:
    ordered = data.draw(st.permutations(tensors))
    file = content(tensors)

    def fill(buffer: memoryview, start: int) -> None:
        buffer[:] = file[start : start + len(buffer)]

    collected: dict[str, list[bytes]] = {}
    rows_of: dict[str, int] = {}
    for rows in ReadAhead(CPU, readers, buffers, size).read(ordered, fill):
        assert isinstance(rows, TensorRows)
        spec = rows.stored.spec
        assert rows.values.dtype == spec.torch_dtype
        assert rows.values.shape[1:] == spec.shape[1:]
        assert rows.values.data_ptr() % rows.values.itemsize == 0
        assert rows.first == rows_of.get(spec.name, 0)
        rows_of[spec.name] = rows.first + (len(rows.values) if spec.shape else 1)
        assert rows.last == (rows_of[spec.name] == (spec.shape[0] if spec.shape else 1))
        collected.setdefault(spec.name, []).append(raw(rows))
    assert list(collected) == [stored.spec.name for stored in ordered]
    for stored in tensors:
        expected = file[stored.start : stored.start + stored.size]
        assert b"".join(collected[stored.spec.name]) == expected


@given(files(), st.integers(1, 3000))
def test_a_tensor_is_cut_as_far_as_its_kind_allows(tensors: list[StoredTensor], room: int) -> None:
    for stored in tensors:
        parts = ranges_of(stored, room)
        assert (parts[0].start, parts[-1].stop) == (stored.start, stored.start + stored.size)
        assert all(before.stop == after.start for before, after in pairwise(parts))
        matrix = len(stored.spec.shape) == 2
        for part in parts:
            assert part.stop - part.start <= room or part.count <= (BLOCK if matrix else 1)
            assert not matrix or part.first % BLOCK == 0


@given(files(), st.integers(1, 3000))
def test_a_span_fits_a_buffer_and_has_no_holes(tensors: list[StoredTensor], room: int) -> None:
    for span in read_spans(tensors, room):
        assert span[-1].stop - span[0].start <= room or len(span) == 1
        for before, after in pairwise(span):
            assert before.stop == after.start
            assert (after.start - span[0].start) % after.item.spec.torch_dtype.itemsize == 0


def test_neighbours_are_read_together_and_large_tensors_in_parts() -> None:
    small = [StoredTensor(TensorSpec(f"s{n}", (8,), "float32"), n * 32, 32) for n in range(3)]
    large = StoredTensor(TensorSpec("l", (300, 4), "bfloat16"), 96, 2400)
    assert list(read_spans([*small, large], 2100)) == [
        [*(ReadRange(stored, 0, 8, stored.start, stored.start + 32) for stored in small)],
        [ReadRange(large, 0, 256, 96, 96 + 2048)],
        [ReadRange(large, 256, 44, 96 + 2048, 96 + 2400)],
    ]


# --- ahead, and no further

ROWS = StoredTensor(TensorSpec("w", (1000,), "float32"), 0, 4000)
"""Ten spans of 400 bytes."""


class Fills:
    """Notes which spans are read; those from `held` on wait for `go`."""

    def __init__(self, held: int = 10, failing: int = -1) -> None:
        self.go = threading.Event()
        self.begun: list[int] = []
        self.ended = 0
        self._held = held
        self._failing = failing
        self._lock = threading.Lock()

    def __call__(self, buffer: memoryview, start: int) -> None:
        index = start // 400
        with self._lock:
            self.begun.append(index)
        if index >= self._held:
            assert self.go.wait(60)
        buffer[:] = bytes(len(buffer))
        with self._lock:
            self.ended += 1
        if index == self._failing:
            raise ValueError(f"span {index}")


def until(condition) -> None:
    give_up = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.001)


def test_buffers_are_filled_ahead_and_only_when_they_are_free() -> None:
    fills = Fills()
    reading = ReadAhead(CPU, 2, 3, 400).read([ROWS], fills)
    for taken in range(1, 4):
        assert next(reading).first == (taken - 1) * 100
        # the rows just taken still hold their buffer
        until(lambda taken=taken: fills.ended == taken + 2)
        time.sleep(0.02)
        assert sorted(fills.begun) == list(range(taken + 2))
    reading.close()


def test_what_a_read_raises_comes_in_the_place_of_its_rows() -> None:
    fills = Fills(failing=4)
    collected = []
    with pytest.raises(ValueError, match="span 4"):
        collected.extend(rows.first for rows in ReadAhead(CPU, 2, 3, 400).read([ROWS], fills))
    assert collected == [0, 100, 200, 300]
    begun = list(fills.begun)
    assert fills.ended == len(begun) < 10
    time.sleep(0.02)
    assert fills.begun == begun


def test_closing_waits_for_reads_under_way_and_begins_no_others() -> None:
    fills = Fills(held=1)
    reading = ReadAhead(CPU, 2, 6, 400).read([ROWS], fills)
    next(reading)
    until(lambda: len(fills.begun) == 3)
    closing = threading.Thread(target=reading.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    fills.go.set()
    closing.join(60)
    assert fills.ended == len(fills.begun) == 3


def test_buffers_serve_one_file_after_the_other() -> None:
    """Also after one that was given up."""
    ahead = ReadAhead(CPU, 2, 3, 400)
    places = set()
    for end in (2, 10, 10):
        reading = ahead.read([ROWS], Fills())
        for _, rows in zip(range(end), reading, strict=False):
            places.add(rows.values.data_ptr())
        reading.close()
    assert len(places) == 3
