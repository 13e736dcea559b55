# SPDX-License-Identifier: Apache-2.0
"""Reads bodies that came over HTTP from shared buffers, one for each API server process."""

import ctypes
import logging
import mmap
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from vllm_fp8ext.shared_memory import free_bytes
from vllm_fp8ext.update.contract.safetensors_header import StoredTensor
from vllm_fp8ext.update.transports.gather import read_items
from vllm_fp8ext.update.transports.http.message import UploadSource
from vllm_fp8ext.update.transports.memory import ResidentTensors
from vllm_fp8ext.update.transports.read_ahead import ByteRange, RawBytes, ReadItem, TensorRows
from vllm_fp8ext.update.transports.receiver import RankDevice, Receiver

logger = logging.getLogger("vllm.fp8ext")

_PORTABLE = 1
"""Page-locked for all of a process's GPUs."""


class UploadReceiver(Receiver[UploadSource]):
    """Keeps the shared buffer of each API server process mapped.

    For a GPU it is page-locked when it is mapped, so that copies to the GPU run beside the reading.
    """

    def __init__(self, rank: RankDevice) -> None:
        super().__init__(rank)
        self._shared: dict[str, SharedBuffer] = {}
        """Mapped buffers by path."""

    @contextmanager
    def open(
        self,
        source: UploadSource,
        tensors: Sequence[StoredTensor],
        as_rows: Collection[str],
        require_wanted: Callable[[], None],
    ) -> Iterator[Iterable[ResidentTensors | TensorRows]]:
        """Yield the tensors of a body (`Receiver.open`); rows are those of whole tensors."""
        schedule = self._rank.copy_schedule(tensors, as_rows)
        parts = mapped_parts(self._mapped(source.path), source.offset, read_items(schedule))
        yield self._rank.gather.copy_groups(parts, schedule, require_wanted)

    def _mapped(self, path: str) -> mmap.mmap:
        """Return the mapped buffer.

        Buffers that are gone are given up: a trainer that calls its engine anew has another.
        """
        if path not in self._shared:
            for gone in [known for known in self._shared if not os.path.exists(known)]:
                self._shared.pop(gone).close()
            self._shared[path] = SharedBuffer(path, page_lock=self._rank.on_gpu)
        return self._shared[path].content


def mapped_parts(
    mapped: mmap.mmap, offset: int, items: Iterable[ReadItem]
) -> Iterator[TensorRows | RawBytes]:
    """Yield these items, in this order, of a body that begins at byte `offset`."""
    for item in items:
        if isinstance(item, ByteRange):
            if item.start == item.stop:
                continue
            raw = torch.frombuffer(
                mapped, dtype=torch.uint8, count=item.stop - item.start, offset=offset + item.start
            )
            yield RawBytes(item.destination, raw)
        else:
            yield TensorRows(item, 0, _view(mapped, offset + item.start, item))


class SharedBuffer:
    """Maps the shared buffer of uploads.

    Without `page_lock` copies to the GPU go through a buffer of the driver's: slower, not wrong. The driver locks it, since
    it refuses a file on a disk: the runtime would report that once more at whatever comes next. Locking takes memory for all
    of it, but none that vLLM's own shared memory has claimed.
    """

    def __init__(self, path: str, *, page_lock: bool) -> None:
        self.path = path
        free = free_bytes(os.path.dirname(path))  # first: other ranks may take of what is missing meanwhile
        descriptor = os.open(path, os.O_RDWR)
        try:
            self.content = mmap.mmap(descriptor, 0)
            missing = len(self.content) - os.fstat(descriptor).st_blocks * 512
        finally:
            os.close(descriptor)
        self._locked = False
        if page_lock and missing > free:
            message = "fp8ext: the shared buffer is not page-locked: %d bytes more were needed, %d are free"
            logger.warning(message, missing, free)
        elif page_lock:
            self._locked = self._driver("cuMemHostRegister_v2", ctypes.c_size_t(len(self.content)), _PORTABLE)

    def close(self) -> None:
        """Give its memory back, once no tensor is a view of it."""
        if self._locked:
            self._driver("cuMemHostUnregister")
        del self.content

    def _driver(self, function: str, *arguments: Any) -> bool:
        from vllm_fp8ext.kernels.runtime import cuda_kernel

        address = torch.frombuffer(self.content, dtype=torch.uint8).data_ptr()
        try:
            cuda_kernel.call(function, ctypes.c_void_p(address), *arguments)
        except cuda_kernel.CudaError as error:
            size = len(self.content)
            logger.warning("fp8ext: the shared buffer of %d bytes can't be page-locked: %s", size, error)
            return False
        return True


def _view(mapped: mmap.mmap, start: int, tensor: StoredTensor) -> Tensor:
    if not tensor.size:
        return torch.empty(tensor.spec.shape, dtype=tensor.spec.torch_dtype)
    raw = torch.frombuffer(mapped, dtype=torch.uint8, count=tensor.size, offset=start)
    if start % tensor.spec.torch_dtype.itemsize:
        raw = raw.clone()
    return raw.view(tensor.spec.torch_dtype).view(tensor.spec.shape)
