# SPDX-License-Identifier: Apache-2.0
"""Where a rank reads the bytes of a chunk: the shared buffer of uploads (mapped once), or a file on disk (read, never mapped:
a file that somebody truncates would kill the process that maps it)."""

import ctypes
import logging
import mmap
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.shared_memory import free_bytes
from vllm_fp8ext.update.contract.regular_file import (
    NotRegularError,
    Stamp,
    path_error,
    real_descriptor,
    stamp_of,
)
from vllm_fp8ext.update.contract.safetensors_header import StoredTensor
from vllm_fp8ext.update.transports.gather import Gather, Group, reads
from vllm_fp8ext.update.transports.ipc.message import IpcSource
from vllm_fp8ext.update.transports.memory import Memory, Placed
from vllm_fp8ext.update.transports.nccl.message import BroadcastSource
from vllm_fp8ext.update.transports.read_ahead import (
    BUFFERS,
    READ_BYTES,
    READERS,
    Fill,
    Raw,
    ReadAhead,
    Rows,
    Stretch,
    Wanted,
)

if TYPE_CHECKING:
    from vllm_fp8ext.update.transports.nccl.receiver import Receiver

logger = logging.getLogger("vllm.fp8ext")

CPU = torch.device("cpu")
_PORTABLE = 1
"""Page-locked for all of a process's GPUs."""


@dataclass(frozen=True)
class Source:
    """A version of a file, or a body at `offset` of the shared buffer `path`, which has no `stamp`. A file's `path` has no
    links, and is opened from the descriptor of `folder`, which holds it."""

    path: str
    offset: int = 0
    stamp: Stamp | None = None
    folder: str = "/"


AnySource: TypeAlias = Source | IpcSource | BroadcastSource


def source_of(data: Mapping[str, Any]) -> AnySource:
    """The source that was told as a dict."""
    if "device" in data:
        return IpcSource(data["device"], tuple((handle, size) for handle, size in data["allocations"]))
    if "backend" in data:
        return BroadcastSource(**data)
    stamp = data["stamp"]
    return Source(data["path"], data["offset"], Stamp(*stamp) if stamp else None, data["folder"])


class Sources:
    """Opens sources for one rank; keeps the shared buffer mapped. For a GPU that buffer is page-locked when it is mapped,
    and files are read into page-locked memory, so that copies to the GPU run beside the reading."""

    def __init__(self, rank: int = 0, device: torch.device = CPU) -> None:
        self._rank = rank
        self._device = device
        self._shared: _Shared | None = None
        self._later: list[Callable[[], None]] = []
        self._gather = Gather(device)

    def rehearse(self) -> None:
        """Load what is loaded when it is needed first."""
        if self._device.type == "cuda":
            from vllm_fp8ext.update.transports.ipc import receiver

            receiver.device_index(str(torch.cuda.get_device_properties(self._device).uuid))

    @contextmanager
    def open(
        self,
        source: AnySource,
        tensors: Sequence[StoredTensor],
        apart: Collection[str] = (),
        wanted: Callable[[], None] = lambda: None,
    ) -> Iterator[Iterable[Placed | Rows]]:
        """These tensors, in this order, each valid until the next is taken (`ReadAhead.read`, `Gather.gathered`) and inside
        the context. They come together where they lie on the rank's GPU, or are brought there, if they are none of `apart`
        (by name) nor larger than the room; else as rows, a file's larger tensors in parts, all others whole. What has to be
        waited for is given up when `wanted` raises.

        Raises:
            UpdateError: `file-changed`, on entering, reading or leaving; what `ipc` and `broadcast` raise.
        """
        if isinstance(source, IpcSource):
            from vllm_fp8ext.update.transports.ipc import receiver

            with receiver.opened(source, self._later.append) as memory:
                yield self._placed(tensors, memory)
            return
        if isinstance(source, BroadcastSource):
            with self._receiver.opened(source, wanted) as memory:
                yield self._placed(tensors, memory)
            return
        if source.stamp is None:
            plan = self._plan(tensors, apart)
            parts = mapped_parts(self._mapped(source.path), source.offset, reads(plan))
            yield self._gather.gathered(parts, plan, wanted)
            return
        try:
            descriptor = real_descriptor(source.folder, source.path)
        except OSError as error:
            raise _told(source, error) from None
        try:
            _require_unchanged(descriptor, source)
            plan = self._plan(tensors, apart)
            with closing(self._files.read(reads(plan), _filler(descriptor, source))) as parts:
                yield self._gather.gathered(parts, plan, wanted)
            _require_unchanged(descriptor, source)
        finally:
            os.close(descriptor)

    def _placed(self, tensors: Sequence[StoredTensor], memory: Memory) -> Iterable[Placed | Rows]:
        placed = Placed(tensors, memory)
        return [placed] if self._device.type == "cuda" and memory.device == self._device else placed

    def _plan(self, tensors: Sequence[StoredTensor], apart: Collection[str]) -> list[Group]:
        """On a CPU everything comes as rows."""
        names = apart if self._device.type == "cuda" else {stored.spec.name for stored in tensors}
        return self._gather.plan(tensors, names)

    def tidy(self) -> None:
        """Do what is left of sources that were open, and what nobody has to wait for."""
        while self._later:
            self._later.pop()()

    @cached_property
    def _files(self) -> ReadAhead:
        return ReadAhead(self._device, READERS, BUFFERS, READ_BYTES)

    @cached_property
    def _receiver(self) -> "Receiver":
        from vllm_fp8ext.update.transports.nccl.receiver import Receiver

        return Receiver(self._rank, self._device)

    def _mapped(self, path: str) -> mmap.mmap:
        """One at a time: a trainer that calls its engine anew has another, and nothing comes by the former any more."""
        if self._shared is None or self._shared.path != path:
            if self._shared is not None:
                self._shared.close()
            self._shared = _Shared(path, page_lock=self._device.type == "cuda")
        return self._shared.content


def mapped_parts(mapped: mmap.mmap, offset: int, wanted: Iterable[Wanted]) -> Iterator[Rows | Raw]:
    """All of this, in this order, of a body that begins there."""
    for of in wanted:
        if isinstance(of, Stretch):
            if of.start == of.stop:
                continue
            raw = torch.frombuffer(
                mapped, dtype=torch.uint8, count=of.stop - of.start, offset=offset + of.start
            )
            yield Raw(of.at, raw)
        else:
            yield Rows(of, 0, _view(mapped, offset + of.start, of))


def _filler(descriptor: int, source: Source) -> Fill:
    def fill(buffer: memoryview, start: int) -> None:
        position = source.offset + start
        while buffer:
            try:
                count = os.preadv(descriptor, [buffer], position)
            except OSError as error:
                raise _told(source, error) from None
            if not count:
                raise _changed(source)
            buffer, position = buffer[count:], position + count

    return fill


class _Shared:
    """The shared buffer of uploads, mapped.

    Without `page_lock` copies to the GPU go through a buffer of the driver's: slower, not wrong. By the driver, which refuses
    a file on a disk: the runtime would report that once more at whatever comes next. To lock it takes room for all of it: not
    what shared memory of vLLM's has claimed.
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


def _require_unchanged(descriptor: int, source: Source) -> None:
    if stamp_of(os.fstat(descriptor)) != source.stamp:
        raise _changed(source)


def _told(source: Source, error: OSError) -> UpdateError:
    """It could be opened when its stamp was taken: what is missing now, or no file, was changed since."""
    told = path_error(source.path, error)
    if isinstance(error, NotRegularError) or told.kind in ("not-found", "file-changed"):
        return _changed(source)
    return told


def _changed(source: Source) -> UpdateError:
    return UpdateError("file-changed", f"{source.path} was changed while it was read", status=409)
