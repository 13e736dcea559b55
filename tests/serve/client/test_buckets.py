# SPDX-License-Identifier: Apache-2.0
"""Tensors side by side in buckets."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from vllm_fp8ext.serve.client.transports.nccl.buckets import Bucket, PackingBuffer
from vllm_fp8ext.serve.client.transports.nccl.buckets import buckets as packed
from vllm_fp8ext.update.transports.nccl.message import MARK_BYTES


def buckets(tensors: Any, limit: int) -> Iterator[Bucket]:
    """Each in a room of its own."""
    return packed(tensors, limit, lambda n, device: PackingBuffer(device))


def pairs(*sizes: int) -> list[tuple[str, torch.Tensor]]:
    return [(f"w{n}", torch.full((size,), n, dtype=torch.uint8)) for n, size in enumerate(sizes)]


def test_buckets_are_filled_in_order_up_to_the_limit() -> None:
    limit = 100 + MARK_BYTES
    result = list(buckets(pairs(10, 84, 1, 96, 4, 300, 5), limit))
    assert [[part.name for part in bucket.listed] for bucket in result] == [
        ["w0", "w1"],
        ["w2"],
        ["w3", "w4"],
        ["w5"],
        ["w6"],
    ]
    assert [bucket.bytes - MARK_BYTES for bucket in result] == [100, 1, 100, 300, 5]
    assert [part.offset for part in result[0].listed] == [0, 16]
    assert len({bucket.mark for bucket in result}) == len(result)
    assert list(buckets([], limit)) == []


def test_no_more_of_an_iterable_is_taken_than_is_needed() -> None:
    taken = []

    def tensors():
        for pair in pairs(50, 50, 50, 50):
            taken.append(pair[0])
            yield pair

    next(buckets(tensors(), 100))
    assert taken == ["w0", "w1"]


def test_bytes_lie_at_their_offsets_and_the_mark_behind_them() -> None:
    """Whatever the strides are."""
    tensors = {
        "a": torch.arange(6, dtype=torch.float32).view(2, 3).t(),
        "b": torch.tensor(7.0, dtype=torch.bfloat16),
        "c": torch.randn(4, 1)[::2].to(torch.float8_e4m3fn),
        "d": torch.empty(0, 3),
        "e": torch.randn(9, requires_grad=True),
    }
    [bucket] = buckets(tensors.items(), 1 << 20)
    data = bucket.data()
    assert data.numel() == bucket.bytes
    for name, part in zip(tensors, bucket.listed, strict=True):
        tensor = tensors[name].detach()
        assert (part.name, part.shape, f"torch.{part.dtype}") == (name, list(tensor.shape), str(tensor.dtype))
        result = data[part.offset : part.offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        assert torch.equal(result.float(), tensor.float())
    assert data[-MARK_BYTES:].numpy().tobytes() == bucket.mark


def test_a_tensor_is_packed_before_the_next_one_is_asked_for() -> None:
    """Two rooms are enough for any number of buckets, the next one being packed while one is on its way."""
    rooms = [PackingBuffer(torch.device("cpu")), PackingBuffer(torch.device("cpu"))]
    buffer = torch.empty(40, dtype=torch.uint8)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for n in range(9):
            yield f"w{n}", buffer.fill_(n)
            buffer.fill_(0xAA)

    limit = 2 * 48 + MARK_BYTES
    collected = []
    for bucket in packed(tensors(), limit, lambda n, device: rooms[n % 2]):
        data = bucket.data()
        collected += [data[part.offset].item() for part in bucket.listed]
        assert all(room.data is None or room.data.numel() <= limit for room in rooms)
    assert collected == list(range(9))


def test_a_room_keeps_what_is_there_when_it_grows() -> None:
    room = PackingBuffer(torch.device("cpu"))
    room.grown(3, 0, 100)[:3] = torch.arange(3, dtype=torch.uint8)
    sizes = [room.grown(needed, 3, 20).numel() for needed in (4, 5, 13, 40, 2)]
    assert sizes == [6, 6, 13, 40, 40]
    assert room.data[:3].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (np.ones(2, np.float32), "expected a torch tensor on a GPU or the CPU, found"),
        (torch.ones(2, device="meta"), "expected a torch tensor on a GPU or the CPU, found meta"),
        ("text", "found str"),
    ],
)
def test_what_can_not_be_broadcast(tensor, message: str) -> None:
    with pytest.raises(ValueError, match=f"tensor w: .*{message}"):
        list(buckets([("w", tensor)], 100))


@pytest.mark.parametrize("limit", range(16384, 60000, 1117))
def test_block_scales_stay_beside_their_codes(limit: int) -> None:
    pairs = []
    for number in range(20):
        codes = torch.zeros(128, 128, dtype=torch.float8_e4m3fn)
        pairs += [(f"{number}.weight", codes), (f"{number}.weight_scale_inv", torch.ones(1, 1))]
    result = [[listed.name for listed in bucket.listed] for bucket in buckets(pairs, limit)]
    assert [name for names in result for name in names] == [name for name, _ in pairs]
    assert len(result) > 1
    for names in result:
        assert {name.removesuffix("_scale_inv") for name in names} <= set(names)
        assert len(names) % 2 == 0
    together = [bucket.bytes for bucket in buckets(pairs, limit) if len(bucket.listed) > 2]
    assert all(size <= limit for size in together)
