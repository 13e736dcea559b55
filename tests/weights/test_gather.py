# SPDX-License-Identifier: Apache-2.0
"""Tensors that are brought to the rank's device in groups, against those that were sent."""

from collections.abc import Iterator
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vllm_fp8ext.weights.gather import Gather, groups
from vllm_fp8ext.weights.manifest import TensorSpec
from vllm_fp8ext.weights.memory import Placed
from vllm_fp8ext.weights.read_ahead import Rows
from vllm_fp8ext.weights.safetensors_header import StoredTensor

ROOM = 4096
shapes = st.lists(
    st.one_of(st.just(()), st.tuples(st.integers(0, 40)), st.tuples(st.integers(1, 40), st.integers(1, 90))),
    max_size=12,
)


def sent(of: list[tuple[int, ...]]) -> dict[str, Tensor]:
    noise = torch.Generator().manual_seed(len(of))
    return {str(index): torch.randn(shape, generator=noise) for index, shape in enumerate(of)}


def stored(tensors: dict[str, Tensor]) -> list[StoredTensor]:
    """One behind the other."""
    found, start = [], 8
    for name, tensor in tensors.items():
        spec = TensorSpec(name, tuple(tensor.shape), "float32")
        found.append(StoredTensor(spec, start, tensor.nbytes))
        start += tensor.nbytes
    return found


def in_parts(tensors: dict[str, Tensor], step: int) -> Iterator[Rows]:
    """So many rows at a time, in a place that is used again."""
    place = torch.empty(40 * 90)
    for where in stored(tensors):
        values = tensors[where.spec.name]
        for first in range(0, max(1, len(values)) if values.ndim else 1, step):
            rows = values[first : first + step] if values.ndim else values
            read = place[: rows.numel()].view(rows.shape).copy_(rows)
            yield Rows(where, first, read)
            place.fill_(float("nan"))


@given(shapes, st.sets(st.sampled_from([str(index) for index in range(12)])), st.integers(1, 50))
def test_everything_comes_whole_and_in_order(of: list[tuple[int, ...]], apart: set[str], step: int) -> None:
    tensors = sent(of)
    found: dict[str, Tensor] = {}
    gather = Gather(torch.device("cpu"), ROOM)
    together = set()
    for part in gather.gathered(in_parts(tensors, step), stored(tensors), apart):
        for rows in (part,) if isinstance(part, Rows) else part:
            name = rows.stored.spec.name
            found[name] = torch.cat([found[name], rows.values]) if name in found else rows.values.clone()
        if isinstance(part, Placed):
            together |= {where.spec.name for where in part.tensors}
    assert list(found) == list(tensors)
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert together == {
        name for name, tensor in tensors.items() if name not in apart and tensor.nbytes <= ROOM
    }


@given(shapes, st.sets(st.sampled_from([str(index) for index in range(12)])))
def test_groups_fit_and_are_as_large_as_they_can_be(of: list[tuple[int, ...]], apart: set[str]) -> None:
    listed = list(groups(stored(sent(of)), ROOM, apart))
    for group in listed:
        assert group.tensors
        if group.fits:
            assert group.tensors[-1].start + group.tensors[-1].size <= ROOM
            assert all(where.start % 256 == 0 for where in group.tensors)
    for group, following in pairwise(listed):
        if group.fits and following.fits:
            end = group.tensors[-1].start + group.tensors[-1].size
            assert -(-end // 256) * 256 + following.tensors[0].size > ROOM
