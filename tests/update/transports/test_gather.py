# SPDX-License-Identifier: Apache-2.0
"""Tensors that are brought to the rank's device in groups, from a file or a body, against those that were sent."""

import mmap
from collections.abc import Iterable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vllm_fp8ext.update.contract.manifest import TensorSpec
from vllm_fp8ext.update.contract.safetensors_header import StoredTensor
from vllm_fp8ext.update.transports.gather import Gather, group_tensors, read_items
from vllm_fp8ext.update.transports.http.receiver import mapped_parts
from vllm_fp8ext.update.transports.memory import ResidentTensors
from vllm_fp8ext.update.transports.read_ahead import RawBytes, ReadAhead, ReadItem, TensorRows

CPU = torch.device("cpu")
ROOM, OFFSET = 4096, 7
shapes = st.lists(
    st.tuples(
        st.one_of(
            st.just(()), st.tuples(st.integers(0, 40)), st.tuples(st.integers(1, 40), st.integers(1, 90))
        ),
        st.sampled_from((torch.float32, torch.bfloat16)),
        st.sampled_from((0, 0, 0, 1, 600)),  # a hole behind it
    ),
    max_size=12,
)
Shapes = list[tuple[tuple[int, ...], torch.dtype, int]]
numbers = st.sets(st.sampled_from([str(index) for index in range(12)]))


def body(of: Shapes) -> tuple[bytes, dict[str, Tensor], list[StoredTensor]]:
    """Bytes, from some way into them tensors, what these are, and where."""
    noise = torch.Generator().manual_seed(len(of))
    data, tensors, stored = bytearray(bytes(OFFSET)), {}, []
    for index, (shape, dtype, hole) in enumerate(of):
        values = torch.randn(shape, generator=noise).to(dtype)
        spec = TensorSpec(str(index), shape, str(dtype).removeprefix("torch."))
        stored.append(StoredTensor(spec, len(data) - OFFSET, values.nbytes))
        tensors[spec.name] = values
        data += values.reshape(-1).view(torch.uint8).numpy().tobytes() + bytes(hole)
    return bytes(data), tensors, stored


def read(data: bytes, of: Iterable[ReadItem], way: str) -> Iterable[TensorRows | RawBytes]:
    if way == "mapped":
        mapped = mmap.mmap(-1, max(1, len(data)))
        mapped[: len(data)] = data
        return mapped_parts(mapped, OFFSET, of)

    def fill(buffer: memoryview, start: int) -> None:
        buffer[:] = data[OFFSET + start : OFFSET + start + len(buffer)]

    return ReadAhead(CPU, 2, 3, 1000).read(of, fill)


@pytest.mark.parametrize("way", ["mapped", "read"])
@given(shapes, numbers)
def test_everything_comes_whole_and_in_order(way: str, of: Shapes, apart: set[str]) -> None:
    data, tensors, stored = body(of)
    gather = Gather(CPU, ROOM)
    schedule = gather.copy_schedule(stored, apart)
    collected: dict[str, Tensor] = {}
    together = set()
    for part in gather.copy_groups(read(data, read_items(schedule), way), schedule):
        for rows in (part,) if isinstance(part, TensorRows) else part:
            name = rows.stored.spec.name
            collected[name] = (
                torch.cat([collected[name], rows.values]) if name in collected else rows.values.clone()
            )
        if isinstance(part, ResidentTensors):
            together |= {where.spec.name for where in part.tensors}
    assert list(collected) == list(tensors)
    assert all(torch.equal(collected[name], tensors[name]) for name in tensors)
    assert together == {name for name in tensors if name not in apart and tensors[name].nbytes <= ROOM}


@given(shapes, numbers)
def test_groups_fit_and_are_as_large_as_they_can_be(of: Shapes, apart: set[str]) -> None:
    _, _, stored = body(of)
    listed = list(group_tensors(stored, ROOM, apart))
    for group in listed:
        assert group.tensors
        for where in group.tensors:
            assert where.start % 16 == 0 or not group.ranges
        for part, following in pairwise(group.ranges):
            adjoin = part.stop == following.start
            assert not adjoin or (part.destination + part.stop - part.start) % 16, "neighbours are one"
        for part in group.ranges:
            assert part.destination % 256 == 0
            assert part.destination + part.stop - part.start <= ROOM
    for group, following in pairwise(listed):
        if group.ranges and following.ranges:
            end = group.tensors[-1].start + group.tensors[-1].size
            assert -(-end // 256) * 256 + following.tensors[0].size > ROOM
