# SPDX-License-Identifier: Apache-2.0
"""Reads tensors where another process holds them on a GPU, through CUDA IPC.

Handles are open for the time of one chunk. They are opened through the driver, with ctypes: torch's own sharing wants pickled
objects and counts references.
"""

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
from vllm_fp8ext.update.transports.memory import AllocatedMemory, ResidentTensors
from vllm_fp8ext.update.transports.read_ahead import TensorRows
from vllm_fp8ext.update.transports.receiver import RankDevice, Receiver

_LAZY_PEER_ACCESS = 1


class Handle(ctypes.Structure):
    """A CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_byte * HANDLE_BYTES),)


class IpcReceiver(Receiver[IpcSource]):
    """Opens handles for one chunk, and closes them when nobody waits for it."""

    def __init__(self, rank: RankDevice) -> None:
        super().__init__(rank)
        self._deferred: list[Callable[[], None]] = []

    def warm_up(self) -> None:
        """Load what the driver loads when a handle is opened first."""
        device_index(str(torch.cuda.get_device_properties(self._rank.device).uuid))

    @contextmanager
    def open(
        self,
        source: IpcSource,
        tensors: Sequence[StoredTensor],
        as_rows: Collection[str],
        require_wanted: Callable[[], None],
    ) -> Iterator[Iterable[ResidentTensors | TensorRows]]:
        """Yield the tensors where they are (`Receiver.open`).

        Raises:
            UpdateError: as `open_allocations`.
        """
        with open_allocations(source, self._deferred.append) as memory:
            yield self._rank.resident(tensors, memory)

    def close_deferred(self) -> None:
        """Close handles."""
        while self._deferred:
            self._deferred.pop()()


@contextmanager
def open_allocations(
    source: IpcSource, defer: Callable[[Callable[[], None]], None]
) -> Iterator[AllocatedMemory]:
    """Open the other process's memory, valid inside the context.

    When it is left nothing reads there any more; the handles are closed by the call that is given to `defer`.

    Raises:
        UpdateError: `bad-handle`: a GPU that this process does not see, a handle that can't be opened, a smaller allocation.
    """
    index = device_index(source.device)
    addresses: list[int] = []
    try:
        with _current(
            index
        ):  # only while handles are opened: what reads the tensors runs on the rank's own GPU
            for text, size in source.allocations:
                addresses.append(_open(text))
                _require_size(addresses[-1], size)
        yield AllocatedMemory(torch.device("cuda", index), addresses, source.bounds)
    finally:
        torch.cuda.current_stream().synchronize()  # the rank's own: what it queued may still read
        if addresses:
            with torch.cuda.device(index):
                torch.cuda.current_stream().synchronize()  # copies between GPUs
        defer(partial(_close, index, addresses))


@contextmanager
def _current(index: int) -> Iterator[None]:
    """Make a GPU the current one: of another GPU than the rank's own the first time takes memory there."""
    try:
        with torch.cuda.device(index):
            yield
    except RuntimeError as error:
        raise _bad_handle(
            f"expected a GPU that the rank can use beside its own, found cuda:{index}: {error}"
        ) from None


def _close(index: int, addresses: list[int]) -> None:
    with torch.cuda.device(index):
        for address in addresses:
            cuda_kernel.call("cuIpcCloseMemHandle", ctypes.c_ulonglong(address))


def device_index(uuid: str) -> int:
    """Return the index of this process's GPU with this UUID."""
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid.removeprefix("GPU-"):
            return index
    raise _bad_handle(f"expected a GPU that the server sees, found {uuid}")


def _open(text: str) -> int:
    handle, address = Handle.from_buffer_copy(base64.b64decode(text)), ctypes.c_ulonglong()
    try:
        cuda_kernel.call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, _LAZY_PEER_ACCESS)
    except CudaError as error:
        raise _bad_handle(
            f"a handle could not be opened ({error}): is its process alive, and another one?"
        ) from None
    return address.value


def _require_size(address: int, size: int) -> None:
    _, allocated = cuda_kernel.allocation_of(address)
    if allocated < size:
        raise _bad_handle(f"an allocation should have {size} bytes, found {allocated}")


def _bad_handle(message: str) -> UpdateError:
    return UpdateError("bad-handle", message, status=422)
