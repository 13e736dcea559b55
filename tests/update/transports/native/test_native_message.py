# SPDX-License-Identifier: Apache-2.0
"""Buckets end where vLLM ends them, and tensors lie aligned."""

import warnings

import pytest
import torch
from vllm.distributed.weight_transfer.packed_tensor import pack_tensors

from vllm_fp8ext.update.contract.manifest import TensorSpec
from vllm_fp8ext.update.contract.native_info import NcclInit
from vllm_fp8ext.update.transports.native.group import pickled_id
from vllm_fp8ext.update.transports.native.message import (
    NativeSource,
    batches,
    broadcasts,
    native_source,
    placed,
)
from vllm_fp8ext.update.transports.registry import source_from_dict

INIT = NcclInit(rank_offset=1, world_size=2, master_address="127.0.0.1", master_port=1)


@pytest.mark.parametrize("bucket", [1, 99, 100, 101, 250, 10_000])
@pytest.mark.parametrize("sizes", [[100], [100, 100, 100], [1, 300, 1, 1], [50, 50, 1, 99, 7, 0, 120]])
def test_buckets_are_those_of_vllm(sizes: list[int], bucket: int) -> None:
    tensors = iter([(str(n), torch.zeros(size, dtype=torch.uint8)) for n, size in enumerate(sizes)])
    packed = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while (chunk := pack_tensors(tensors, lambda item: item[1], bucket)) is not None:
            packed.append([int(name) for name in chunk.names])
    assert [list(which) for which in broadcasts(sizes, bucket)] == packed


def test_tensors_that_come_one_by_one_are_received_together() -> None:
    specs = [TensorSpec(str(n), (size,), "uint8") for n, size in enumerate((10, 20, 30, 40))]
    result = [
        (parts, [spec.name for spec in some]) for parts, some in batches(specs, [10, 20, 30, 40], None, 60)
    ]
    assert result == [([10, 20, 30], ["0", "1", "2"]), ([40], ["3"])]
    assert [parts for parts, _ in batches(specs, [10, 20, 30, 40], 25, 1000)] == [[30], [30], [40]]


def test_a_tensor_behind_an_odd_one_is_moved_behind_all() -> None:
    specs = [
        TensorSpec("a", (3,), "bfloat16"),
        TensorSpec("b", (2,), "float32"),
        TensorSpec("c", (1,), "bfloat16"),
    ]
    batch = placed(native_source(INIT, 1, "gloo", 1.0, [16]), specs)
    assert [(t.spec.name, t.start, t.size) for t in batch.tensors] == [
        ("a", 0, 6),
        ("b", 16, 8),
        ("c", 14, 2),
    ]
    assert batch.source.moves == ((6, 16, 8),)
    assert batch.source.bytes == 24


def test_a_source_comes_back_from_json() -> None:
    source = native_source(INIT, 3, "gloo", 1.0, [16, 4])
    result = source_from_dict(source.as_dict())
    assert isinstance(result, NativeSource)
    assert result == source


def test_an_id_is_read_without_unpickling() -> None:
    import pickle

    from vllm.distributed.device_communicators.pynccl_wrapper import ncclUniqueId

    unique = ncclUniqueId()
    for index in range(128):
        unique.internal[index] = index - 64
    assert pickled_id(pickle.dumps(unique)) == bytes(value % 256 for value in range(-64, 64))


class _Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return pytest.fail, ("it was executed",)


@pytest.mark.parametrize("content", [b"x", b"\x00" * 5000, b"\x80\x04C\x01a."])
def test_what_is_no_id_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"unique id|pickle|opcode"):
        pickled_id(content)


def test_nothing_of_a_pickle_is_executed() -> None:
    import pickle

    with pytest.raises(ValueError, match="unique id"):
        pickled_id(pickle.dumps(_Bomb()))
