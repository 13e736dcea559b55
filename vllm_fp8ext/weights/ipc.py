# SPDX-License-Identifier: Apache-2.0
"""Tensors that another process of this machine holds on a GPU, read where they lie: CUDA's inter-process handles, opened for
the time of one chunk. Through the driver, with ctypes: torch's own sharing wants pickled objects and counts references."""

import base64
import bisect
import ctypes
import functools
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.weights.ipc_source import HANDLE_BYTES, IpcSource
from vllm_fp8ext.weights.safetensors_header import StoredTensor

_LAZY_PEER_ACCESS = 1


class Handle(ctypes.Structure):
    """A CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_byte * HANDLE_BYTES),)


class _Memory:
    """Memory of the device, as torch takes it."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


@contextmanager
def opened(source: IpcSource) -> Iterator[Any]:
    """A reader of a source's tensors, views of the other process's memory, valid inside the context.

    Raises:
        UpdateError: `bad-handle`: a GPU that this process does not see, a handle that can't be opened, a smaller allocation.
    """
    index = device_index(source.device)
    bounds = list(itertools.accumulate((size for _, size in source.allocations), initial=0))
    addresses: list[int] = []
    with torch.cuda.device(index):
        try:
            parts = []
            for text, size in source.allocations:
                addresses.append(_open(text))
                parts.append(
                    torch.as_tensor(_Memory(_checked(addresses[-1], size), size), device=f"cuda:{index}")
                )

            def read(tensor: StoredTensor) -> Tensor:
                number = bisect.bisect_right(bounds, tensor.start) - 1
                start = tensor.start - bounds[number]
                raw = parts[number][start : start + tensor.size]
                return raw.view(tensor.spec.torch_dtype).view(tensor.spec.shape)

            yield read
        finally:
            torch.cuda.current_stream().synchronize()
            for address in addresses:
                driver().cuIpcCloseMemHandle(ctypes.c_ulonglong(address))


def device_index(uuid: str) -> int:
    """Which of this process's GPUs has this UUID."""
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid.removeprefix("GPU-"):
            return index
    raise _bad(f"expected a GPU that the server sees, found {uuid}")


def _open(text: str) -> int:
    handle, address = Handle.from_buffer_copy(base64.b64decode(text)), ctypes.c_ulonglong()
    failed = driver().cuIpcOpenMemHandle_v2(ctypes.byref(address), handle, _LAZY_PEER_ACCESS)
    if failed:
        raise _bad(
            f"a handle could not be opened (CUDA error {failed}): is its process alive, and another one?"
        )
    return address.value


def _checked(address: int, size: int) -> int:
    base, found = ctypes.c_ulonglong(), ctypes.c_size_t()
    failed = driver().cuMemGetAddressRange_v2(
        ctypes.byref(base), ctypes.byref(found), ctypes.c_ulonglong(address)
    )
    if failed or found.value < size:
        raise _bad(f"an allocation should have {size} bytes, found {found.value}")
    return address


@functools.cache
def driver() -> ctypes.CDLL:
    """CUDA's driver.

    Raises:
        UpdateError: `bad-handle`: there is none.
    """
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise _bad("expected a server on GPUs, found none") from None


def _bad(message: str) -> UpdateError:
    return UpdateError("bad-handle", message, status=422)
