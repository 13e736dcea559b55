# SPDX-License-Identifier: Apache-2.0
"""Tensors that another process of this machine holds on a GPU, read where they lie: CUDA's inter-process handles, opened for
the time of one chunk. Through the driver, with ctypes: torch's own sharing wants pickled objects and counts references."""

import base64
import bisect
import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.kernels import cuda
from vllm_fp8ext.kernels.cuda import CudaError
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
def opened(source: IpcSource, later: Callable[[Callable[[], None]], None]) -> Iterator[Any]:
    """A reader of a source's tensors, views of the other process's memory, valid inside the context. When it is left nothing
    reads there any more; the handles are closed by what is given to `later`.

    Raises:
        UpdateError: `bad-handle`: a GPU that this process does not see, a handle that can't be opened, a smaller allocation.
    """
    index = device_index(source.device)
    addresses: list[int] = []
    try:
        parts = []
        # only while handles are opened: what reads the tensors runs on the rank's own GPU
        with torch.cuda.device(index):
            for text, size in source.allocations:
                addresses.append(_open(text))
                parts.append(
                    torch.as_tensor(_Memory(_checked(addresses[-1], size), size), device=f"cuda:{index}")
                )

        def read(tensor: StoredTensor) -> Tensor:
            number = bisect.bisect_right(source.bounds, tensor.start, hi=len(parts)) - 1
            start = tensor.start - source.bounds[number]
            raw = parts[number][start : start + tensor.size]
            return raw.view(tensor.spec.torch_dtype).view(tensor.spec.shape)

        yield read
    finally:
        torch.cuda.current_stream().synchronize()  # the rank's own: what it queued may still read
        with torch.cuda.device(index):
            torch.cuda.current_stream().synchronize()  # copies between GPUs
        later(partial(_close, index, addresses))


def _close(index: int, addresses: list[int]) -> None:
    with torch.cuda.device(index):
        for address in addresses:
            cuda.call("cuIpcCloseMemHandle", ctypes.c_ulonglong(address))


def device_index(uuid: str) -> int:
    """Which of this process's GPUs has this UUID."""
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid.removeprefix("GPU-"):
            return index
    raise _bad(f"expected a GPU that the server sees, found {uuid}")


def _open(text: str) -> int:
    handle, address = Handle.from_buffer_copy(base64.b64decode(text)), ctypes.c_ulonglong()
    try:
        cuda.call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, _LAZY_PEER_ACCESS)
    except CudaError as error:
        raise _bad(
            f"a handle could not be opened ({error}): is its process alive, and another one?"
        ) from None
    return address.value


def _checked(address: int, size: int) -> int:
    _, found = cuda.allocation_of(address)
    if found < size:
        raise _bad(f"an allocation should have {size} bytes, found {found}")
    return address


def _bad(message: str) -> UpdateError:
    return UpdateError("bad-handle", message, status=422)
