# SPDX-License-Identifier: Apache-2.0
"""Reads tensors that a trainer's torch has exported, by torch itself: it waits for their events, and counts who reads.

On a CPU shared memory stands in for a GPU's: the "GPU" is `cpu`, a handle names a file of `/dev/shm`.
"""

import base64
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import Tensor, UntypedStorage

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract.native_handles import ExportedTensor
from vllm_fp8ext.update.contract.safetensors_header import StoredTensor
from vllm_fp8ext.update.transports.ipc.receiver import device_index
from vllm_fp8ext.update.transports.memory import ResidentTensors
from vllm_fp8ext.update.transports.native_ipc.message import NativeIpcSource
from vllm_fp8ext.update.transports.read_ahead import TensorRows
from vllm_fp8ext.update.transports.receiver import RankDevice, Receiver

CPU_GPU = "cpu"
"""In place of a UUID where there is no GPU."""
CPU_MARK = b"\x02s"
"""Begin of a handle there, before the name of a file."""
_CUDA_KIND = b"c"
"""Second byte of a handle of memory by cudaMalloc; the first is the version of torch's format."""
_CUDA_HANDLE_BYTES = 64
_FILE = re.compile(rb"[A-Za-z0-9_-]{1,60}")

_Export: TypeAlias = tuple[Any, ...]


class NativeIpcReceiver(Receiver[NativeIpcSource]):
    """Opens what a trainer has exported. A packed buffer stays open for the next call, others for one chunk."""

    def __init__(self, rank: RankDevice) -> None:
        super().__init__(rank)
        self._deferred: list[UntypedStorage] = []
        self._buffer: tuple[_Export, UntypedStorage] | None = None
        """The packed buffer that is open, and its export."""

    @contextmanager
    def open(
        self,
        source: NativeIpcSource,
        tensors: Sequence[StoredTensor],
        as_rows: Collection[str],
        require_wanted: Callable[[], None],
    ) -> Iterator[Iterable[ResidentTensors | TensorRows]]:
        """Yield the tensors where they are (`Receiver.open`).

        Raises:
            UpdateError: `bad-handle`: no GPU that this process sees, or a handle that can't be opened.
        """
        require_wanted()
        gpu, handles = self._reachable(source)
        index = None if gpu == CPU_GPU else device_index(gpu)
        try:
            regions = [self._region(handle, index, source.packed) for handle in handles]
            yield self._rank.resident(tensors, Regions(_aligned(regions, tensors)))
        finally:
            if index is not None:
                torch.cuda.current_stream().synchronize()  # the rank's own: what it queued may still read
                torch.cuda.current_stream(index).synchronize()  # copies between GPUs

    def close_deferred(self) -> None:
        """Tell the trainer that nothing of an earlier chunk is read any more."""
        self._deferred.clear()

    def close_shared(self) -> None:
        """Give the packed buffer back."""
        self._buffer = None

    def _reachable(self, source: NativeIpcSource) -> tuple[str, Sequence[ExportedTensor]]:
        """Return handles on the rank's own GPU, or on another that it sees."""
        if not self._rank.on_gpu:
            wanted = [CPU_GPU]
        else:
            count = torch.cuda.device_count()
            own = self._rank.device.index or 0
            order = [own, *(index for index in range(count) if index != own)]
            wanted = [str(torch.cuda.get_device_properties(index).uuid) for index in order]
        by_uuid = {gpu.removeprefix("GPU-"): handles for gpu, handles in source.gpus.items()}
        for gpu in wanted:
            if gpu in by_uuid:
                return gpu, by_uuid[gpu]
        raise bad_handle(f"expected handles on GPU {' or '.join(wanted)}, found {', '.join(sorted(by_uuid))}")

    def _region(self, handle: ExportedTensor, index: int | None, packed: bool) -> Tensor:
        """Return a tensor's bytes, uint8 `[size]`."""
        storage = self._packed(handle, index) if packed else self._opened(handle, index)
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return whole[handle.start : handle.start + handle.size]

    def _packed(self, handle: ExportedTensor, index: int | None) -> UntypedStorage:
        export = (handle.handle, handle.storage_offset, handle.counter, handle.counter_offset, handle.event)
        buffer = self._buffer
        if buffer is None or buffer[0] != export:
            self._buffer = buffer = None  # before another is opened
            self._buffer = buffer = export, open_storage(handle, index)
        return buffer[1]

    def _opened(self, handle: ExportedTensor, index: int | None) -> UntypedStorage:
        self._deferred.append(open_storage(handle, index))
        return self._deferred[-1]


def open_storage(handle: ExportedTensor, index: int | None) -> UntypedStorage:
    """Open memory of another process, on the GPU of this index. It is given back when nothing holds it any more.

    Raises:
        UpdateError: `bad-handle`.
    """
    content = base64.b64decode(handle.handle)
    if index is None:
        return _shared_file(content, handle)
    if len(content) != _CUDA_HANDLE_BYTES and content[1:2] != _CUDA_KIND:
        raise bad_handle(
            "expected memory by cudaMalloc: set PYTORCH_CUDA_ALLOC_CONF without expandable_segments"
        )
    try:
        with torch.cuda.device(index):
            return UntypedStorage._new_shared_cuda(
                *(index, content, handle.storage_bytes, handle.storage_offset),
                *(handle.counter.encode(), handle.counter_offset),
                *(base64.b64decode(handle.event), handle.wait),
            )
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise bad_handle(
            f"a handle could not be opened ({reason}): is its process alive, and another one?"
        ) from None


def _shared_file(content: bytes, handle: ExportedTensor) -> UntypedStorage:
    name = content.removeprefix(CPU_MARK).rstrip(b"\0")
    if not content.startswith(CPU_MARK) or not _FILE.fullmatch(name):
        raise bad_handle("expected a file of shared memory: this server has no GPU")
    try:
        return UntypedStorage.from_file(f"/dev/shm/{name.decode()}", False, handle.storage_bytes)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        message = f"{handle.storage_bytes} bytes of shared memory could not be opened ({reason})"
        raise bad_handle(message) from None


def _aligned(regions: Sequence[Tensor], tensors: Sequence[StoredTensor]) -> list[Tensor]:
    """Return regions, of which those that are not aligned to their tensors' elements are copies."""
    items = {stored.start: stored.spec.torch_dtype.itemsize for stored in tensors if stored.size}
    starts = accumulate((len(region) for region in regions), initial=0)
    return [
        region.clone() if region.data_ptr() % items.get(start, 1) else region
        for start, region in zip(starts, regions, strict=False)
    ]


class Regions:
    """Memory in which tensors lie, each in a region of its own: a `Memory`. Their starts count through all of them.

    `regions`: uint8 `[n]` each, aligned to the elements of its tensor.
    """

    def __init__(self, regions: Sequence[Tensor]) -> None:
        self.device = regions[0].device if regions else torch.device("cpu")
        self._regions = list(regions)
        self._ends = list(accumulate(len(region) for region in regions))

    def addresses(self, starts: Tensor) -> Tensor:
        """Return addresses (`Memory.addresses`)."""
        addresses = []
        for start in starts.tolist():
            number = self._number(start)
            end = self._ends[number]
            addresses.append(self._regions[number].data_ptr() + start - end + len(self._regions[number]))
        return torch.tensor(addresses, dtype=torch.int64)

    def read(self, tensor: StoredTensor) -> Tensor:
        """Return a view (`Memory.read`)."""
        dtype = tensor.spec.torch_dtype
        if not tensor.size:
            return torch.empty(tensor.spec.shape, dtype=dtype, device=self.device)
        return self._regions[self._number(tensor.start)].view(dtype).view(tensor.spec.shape)

    def _number(self, start: int) -> int:
        return min(bisect_right(self._ends, start), len(self._ends) - 1)


def bad_handle(message: str) -> UpdateError:
    """Make the error of a handle that can't be opened."""
    return UpdateError("bad-handle", message, status=422)
