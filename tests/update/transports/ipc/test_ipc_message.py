# SPDX-License-Identifier: Apache-2.0
"""Tensors that a client describes by their place in its memory."""

from typing import Any

import pytest

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.transports.ipc.message import IpcSource, ipc_tensor

SOURCE = IpcSource("gpu", (("a", 1000), ("b", 64)))


def described(**more: Any) -> dict[str, Any]:
    return {"name": "w", "dtype": "bfloat16", "shape": [4, 8], "allocation": 1, "offset": 0, **more}


def test_starts_count_through_all_allocations() -> None:
    tensor = ipc_tensor(SOURCE, **described())
    assert (tensor.start, tensor.size, tensor.spec.shape) == (1000, 64, (4, 8))
    tensor = ipc_tensor(SOURCE, **described(allocation=0, offset=10, dtype="float8_e4m3fn"))
    assert (tensor.start, tensor.size) == (10, 32)
    assert ipc_tensor(SOURCE, **described(shape=[0, 8], offset=64)).size == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"offset": 2},
        {"offset": 66, "shape": [0]},
        {"allocation": 2},
        {"shape": [33]},
        {"allocation": 0, "offset": 11},
    ],
)
def test_tensors_lie_in_their_allocation(wrong: dict[str, Any]) -> None:
    with pytest.raises(UpdateError, match="do not lie in allocation") as refused:
        ipc_tensor(SOURCE, **described(**wrong))
    assert (refused.value.kind, refused.value.status) == ("bad-handle", 422)


def test_dtypes_that_can_not_be_sent() -> None:
    with pytest.raises(UpdateError, match="found int8") as refused:
        ipc_tensor(SOURCE, **described(dtype="int8"))
    assert (refused.value.kind, refused.value.status) == ("wrong-dtype", 422)
