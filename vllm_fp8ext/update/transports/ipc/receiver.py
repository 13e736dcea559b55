# SPDX-License-Identifier: Apache-2.0
"""Tensors that another process of this machine holds on a GPU, read where they lie: CUDA's inter-process handles, opened for
the time of one chunk. Through the driver, with ctypes: torch's own sharing wants pickled objects and counts references."""

import base64
import ctypes
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.kernels.runtime import cuda_kernel
from vllm_fp8ext.kernels.runtime.cuda_kernel import CudaError
from vllm_fp8ext.update.contract.safetensors_header import StoredTensor
from vllm_fp8ext.update.transports.ipc.message import HANDLE_BYTES, IpcSource
from vllm_fp8ext.update.transports.memory import Allocations, Placed
from vllm_fp8ext.update.transports.read_ahead import Rows
from vllm_fp8ext.update.transports.receiver import RankDevice, Receiver

_LAZY_PEER_ACCESS = 1


class Handle(ctypes.Structure):
    """A CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_byte * HANDLE_BYTES),)


class IpcReceiver(Receiver[IpcSource]):
    """Opens handles for one chunk, and closes them when nobody waits for it."""

    def __init__(self, rank: RankDevice) -> None:
        super().__init__(rank)
        self._later: list[Callable[[], None]] = []

    def rehearse(self) -> None:
        """Load what the driver loads when a handle is opened first."""
        device_index(str(torch.cuda.get_device_properties(self._rank.device).uuid))

    @contextmanager
    def open(
        self,
        source: IpcSource,
        tensors: Sequence[StoredTensor],
        apart: Collection[str],
        require_wanted: Callable[[], None],
    ) -> Iterator[Iterable[Placed | Rows]]:
        """Yield the tensors where they are (`Receiver.open`).

        Raises:
            UpdateError: as `opened`.
        """
        with opened(source, self._later.append) as memory:
            yield self._rank.placed(tensors, memory)

    def tidy(self) -> None:
        """Close handles."""
        while self._later:
            self._later.pop()()


@contextmanager
def opened(source: IpcSource, later: Callable[[Callable[[], None]], None]) -> Iterator[Allocations]:
    """The other process's memory, valid inside the context. When it is left nothing reads there any more; the handles are
    closed by what is given to `later`.

    Raises:
        UpdateError: `bad-handle`: a GPU that this process does not see, a handle that can't be opened, a smaller allocation.
    """
    index = device_index(source.device)
    addresses: list[int] = []
    try:
        # only while handles are opened: what reads the tensors runs on the rank's own GPU
        with torch.cuda.device(index):
            for text, size in source.allocations:
                addresses.append(_open(text))
                _require(addresses[-1], size)
        yield Allocations(torch.device("cuda", index), addresses, source.bounds)
    finally:
        torch.cuda.current_stream().synchronize()  # the rank's own: what it queued may still read
        with torch.cuda.device(index):
            torch.cuda.current_stream().synchronize()  # copies between GPUs
        later(partial(_close, index, addresses))


def _close(index: int, addresses: list[int]) -> None:
    with torch.cuda.device(index):
        for address in addresses:
            cuda_kernel.call("cuIpcCloseMemHandle", ctypes.c_ulonglong(address))


def device_index(uuid: str) -> int:
    """Which of this process's GPUs has this UUID."""
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid.removeprefix("GPU-"):
            return index
    raise _bad(f"expected a GPU that the server sees, found {uuid}")


def _open(text: str) -> int:
    handle, address = Handle.from_buffer_copy(base64.b64decode(text)), ctypes.c_ulonglong()
    try:
        cuda_kernel.call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, _LAZY_PEER_ACCESS)
    except CudaError as error:
        raise _bad(
            f"a handle could not be opened ({error}): is its process alive, and another one?"
        ) from None
    return address.value


def _require(address: int, size: int) -> None:
    _, found = cuda_kernel.allocation_of(address)
    if found < size:
        raise _bad(f"an allocation should have {size} bytes, found {found}")


def _bad(message: str) -> UpdateError:
    return UpdateError("bad-handle", message, status=422)
