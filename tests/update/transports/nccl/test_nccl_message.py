# SPDX-License-Identifier: Apache-2.0
"""Tensors that a client describes by their place in a bucket, and the group that it broadcasts to."""

import base64
from dataclasses import replace
from typing import Any

import pytest

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.transports.nccl.message import BroadcastSource, broadcast_tensor, check_group
from vllm_fp8ext.update.transports.registry import source_from_dict

SOURCE = BroadcastSource("gloo", "trainer:2345/a1", 4, 1, 100 + 8, "00" * 8, 60.0)
ID = base64.b64encode(bytes(128)).decode()


def described(**more: Any) -> dict[str, Any]:
    return {"name": "w", "dtype": "bfloat16", "shape": [5, 10], "offset": 0, **more}


def test_a_tensor_lies_where_it_is_said_to() -> None:
    tensor = broadcast_tensor(SOURCE, **described())
    assert (tensor.start, tensor.size, tensor.spec.shape) == (0, 100, (5, 10))
    tensor = broadcast_tensor(SOURCE, **described(dtype="float8_e4m3fn", offset=1, shape=[99]))
    assert (tensor.start, tensor.size) == (1, 99)
    assert broadcast_tensor(SOURCE, **described(shape=[0, 8], offset=100)).size == 0


@pytest.mark.parametrize("wrong", [{"offset": 2}, {"offset": 1, "shape": [4]}, {"shape": [51]}])
def test_tensors_lie_before_the_mark(wrong: dict[str, Any]) -> None:
    with pytest.raises(UpdateError, match="do not lie in 100 bytes before the mark") as refused:
        broadcast_tensor(SOURCE, **described(**wrong))
    assert (refused.value.kind, refused.value.status) == ("invalid-request", 422)


def test_dtypes_that_can_not_be_sent() -> None:
    with pytest.raises(UpdateError, match="found int8") as refused:
        broadcast_tensor(SOURCE, **described(dtype="int8"))
    assert (refused.value.kind, refused.value.status) == ("wrong-dtype", 422)


def test_groups_with_room_for_the_server() -> None:
    check_group(SOURCE, 3)
    check_group(replace(SOURCE, first_rank=3), 1)
    check_group(replace(SOURCE, backend="nccl", id=ID), 3)
    check_group(replace(SOURCE, id="[::1]:80/x"), 3)


@pytest.mark.parametrize(
    ("changes", "world_size", "message"),
    [
        ({}, 4, "a group of 4 has no ranks 1 to 4 for a server of 4"),
        ({"first_rank": 3}, 2, "has no ranks 3 to 4"),
        ({"id": "trainer/a1"}, 1, "expected host:port/name, found 'trainer/a1'"),
        ({"id": "trainer:123456/a1"}, 1, "expected host:port/name"),
        ({"backend": "nccl"}, 1, "expected 128 bytes in base64"),
        ({"backend": "nccl", "id": ID[4:]}, 1, "expected 128 bytes in base64"),
        ({"backend": "nccl", "id": "é"}, 1, "expected 128 bytes in base64"),
    ],
)
def test_groups_that_can_not_be_joined(changes: dict[str, Any], world_size: int, message: str) -> None:
    with pytest.raises(UpdateError, match=message) as refused:
        check_group(replace(SOURCE, **changes), world_size)
    assert (refused.value.kind, refused.value.status) == ("invalid-request", 422)


def test_a_source_survives_the_way_to_the_ranks() -> None:
    assert source_from_dict(SOURCE.as_dict()) == SOURCE
