# SPDX-License-Identifier: Apache-2.0
"""A rank reads what a trainer has exported: each tensor by itself, or a packed buffer that several calls share."""

import base64
from typing import Any

import pytest
import torch
from shared_exports import SharedExports, shared_exports
from torch import Tensor

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract.manifest import TensorSpec
from vllm_fp8ext.update.contract.native_handles import exported, plain
from vllm_fp8ext.update.contract.native_info import spec_bytes
from vllm_fp8ext.update.transports.native_ipc import receiver as module
from vllm_fp8ext.update.transports.native_ipc.message import NativeIpcSource, stored
from vllm_fp8ext.update.transports.receiver import Receivers
from vllm_fp8ext.update.transports.registry import source_from_dict

TENSORS = {
    "odd": torch.arange(3.0).bfloat16(),
    "after": torch.arange(5.0),
    "matrix": torch.linspace(-1, 1, 12).half().view(3, 4),
}
SPECS = [
    TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    for name, tensor in TENSORS.items()
]
SIZES = [spec_bytes(spec) for spec in SPECS]


def source_of(handles: Any, *, packed: bool) -> NativeIpcSource:
    sizes = SIZES if packed else None
    return NativeIpcSource(gpus=exported(plain(handles), SPECS, packed=packed, sizes=sizes), packed=packed)


def read(receivers: Receivers, source: NativeIpcSource) -> dict[str, Tensor]:
    again = source_from_dict(source.as_dict())
    assert again == source
    with receivers.open(again, stored(SPECS, SIZES)) as rows:
        return {row.stored.spec.name: row.values.clone() for row in rows}


def pack(buffer: Tensor, tensors: dict[str, Tensor]) -> None:
    data = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors.values()])
    buffer[: len(data)].copy_(data)


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) and found[name].dtype == expected[name].dtype
        for name in found
    )


def test_tensors_by_themselves() -> None:
    with shared_exports() as exports:
        handles = [{"cpu": exports.reduce(tensor)[1]} for tensor in TENSORS.values()]
        assert same(read(Receivers(), source_of(handles, packed=False)), TENSORS)


def test_a_packed_buffer_is_opened_once_and_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer counts an export as read when it is closed, which may be once."""
    opened: list[Any] = []
    original = module.open_storage
    monkeypatch.setattr(
        module, "open_storage", lambda handle, index: opened.append(handle) or original(handle, index)
    )
    receivers = Receivers()
    with shared_exports() as exports:
        buffer = exports.buffer(64)
        source = source_of({"cpu": exports.reduce(buffer)[1]}, packed=True)
        for factor in (1, 2):
            pack(buffer, tensors := {name: tensor * factor for name, tensor in TENSORS.items()})
            assert same(read(receivers, source), tensors)
            receivers.close_deferred()
        assert len(opened) == 1
        receivers.close_shared()
        assert same(read(receivers, source), tensors)
        assert len(opened) == 2
        other = source_of({"cpu": exports.reduce(another := exports.buffer(64))[1]}, packed=True)
        pack(another, TENSORS)
        assert same(read(receivers, other), TENSORS)
        assert len(opened) == 3


def _named(exports: SharedExports, name: bytes) -> dict[str, Any]:
    handle = plain({"cpu": exports.reduce(exports.buffer(64))[1]})["cpu"]
    return {"cpu": {**handle, "handle": base64.b64encode(name.ljust(66, b"\0")).decode()}}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (b"\x02s../../etc/passwd", "expected a file of shared memory"),
        (b"\x02c" + bytes(range(64)), "expected a file of shared memory"),
        (b"\x02sfp8ext-there-is-none", "could not be opened"),
    ],
)
def test_other_memory_is_not_opened(name: bytes, message: str) -> None:
    with shared_exports() as exports:
        source = source_of(_named(exports, name), packed=True)
    with pytest.raises(UpdateError, match=message) as refused:
        read(Receivers(), source)
    assert refused.value.kind == "bad-handle"


@pytest.mark.skipif(torch.cuda.is_available(), reason="opens what no GPU exported")
@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize(("kind", "message"), [(b"c", "could not be opened"), (b"e", "expandable_segments")])
def test_memory_by_cuda_malloc_is_told_by_the_kind_in_any_version(
    version: int, kind: bytes, message: str
) -> None:
    with shared_exports() as exports:
        source = source_of(_named(exports, bytes([version]) + kind), packed=True)
    with pytest.raises(UpdateError, match=message):
        module.open_storage(source.gpus["cpu"][0], 0)


def test_a_smaller_storage_than_was_told_is_refused() -> None:
    with shared_exports() as exports:
        handles = plain({"cpu": exports.reduce(exports.buffer(64))[1]})
        handles["cpu"] |= {"storage_bytes": 1 << 20}
        with pytest.raises(UpdateError, match="1048576 bytes of shared memory could not be opened"):
            read(Receivers(), source_of(handles, packed=True))


def test_handles_of_another_gpu_are_refused() -> None:
    with shared_exports() as exports:
        handles = {"GPU-1": exports.reduce(exports.buffer(64))[1]}
        with pytest.raises(UpdateError, match="expected handles on GPU cpu, found 1"):
            read(Receivers(), source_of(handles, packed=True))
