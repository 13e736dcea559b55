# SPDX-License-Identifier: Apache-2.0
"""CUDA tensors as inter-process handles: the server reads them where they are. Imports no torch: a CUDA tensor can only be
there when it is."""

import base64
import ctypes
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from vllm_fp8ext.kernels.runtime import cuda_kernel
from vllm_fp8ext.kernels.runtime.cuda_kernel import CudaError
from vllm_fp8ext.serve.client.transports.dense import has_codes, size_with_scales, torch_tensor
from vllm_fp8ext.serve.schema import Allocation, Handles, IpcTensor
from vllm_fp8ext.serve.tensors import TensorLike, never
from vllm_fp8ext.update.contract.manifest import follows
from vllm_fp8ext.update.transports.ipc.message import HANDLE_BYTES

if TYPE_CHECKING:
    from vllm_fp8ext.update.transports.buffers import Buffers


BUFFER_BYTES = 512 << 20
"""Size of a buffer for copies, in bytes. They lie side by side, so that a server opens few handles."""


def batches(
    tensors: Iterable[tuple[str, TensorLike]], limit: float, lent: Callable[[Any], bool] = never
) -> Iterator[list[tuple[str, Any]]]:
    """Yield contiguous CUDA tensors of one device in groups of `limit` bytes. A larger tensor is a group by itself, with its
    block scales.

    `lent`: whether a tensor is its owner's again when the next one is asked for. It is copied on the stream that is current
    here, unless it is a group by itself. A group is to be read before more is asked for.

    Raises:
        ValueError: what is no dense torch tensor on a GPU.
    """
    group = _Group()
    for name, tensor in tensors:
        held = torch_tensor(name, tensor, "cuda")
        size = size_with_scales(held)
        if group.listed and not group.takes(name, held, limit - size):
            yield group.listed
            group = _Group()
        if not lent(tensor):
            group.add(name, held.contiguous())
        elif group.listed or size < limit or has_codes(held):
            group.add_copy(name, held)
        else:
            yield [(name, held.contiguous())]
        del tensor, held  # nothing holds them while the next one is made
    if group.listed:
        yield group.listed


class _Group:
    """Tensors of one device that a server reads together, and room for copies."""

    def __init__(self) -> None:
        self.listed: list[tuple[str, Any]] = []
        self._size = 0
        self._copies: Buffers | None = None

    def takes(self, name: str, tensor: Any, left: float) -> bool:
        """Return whether a tensor belongs to these. `left`: bytes of them that would leave it room."""
        (last, other), fits = self.listed[-1], self._size <= left
        return tensor.device == other.device and (fits or follows(name, last))

    def add(self, name: str, tensor: Any) -> None:
        self.listed.append((name, tensor))
        self._size += tensor.nbytes

    def add_copy(self, name: str, tensor: Any) -> None:
        if self._copies is None:
            from vllm_fp8ext.update.transports.buffers import Buffers

            self._copies = Buffers(BUFFER_BYTES)
        self.add(name, self._copies.empty(tensor.shape, tensor.dtype, tensor.device).copy_(tensor))


def handles(group: list[tuple[str, Any]], n: int) -> Handles:
    """Return the body that tells a server where these tensors are. They must stay as they are until it has answered.

    Raises:
        ValueError: memory that can't be shared (torch's expandable segments, say).
        CudaError: no memory of this GPU.
    """
    import torch

    device = group[0][1].device
    torch.cuda.synchronize(device)  # what is still being computed into them
    numbers: dict[int, int] = {}
    allocations: list[Allocation] = []
    listed = []
    with torch.cuda.device(device):
        for name, tensor in group:
            base, size = cuda_kernel.allocation_of(tensor.data_ptr())
            if base not in numbers:
                numbers[base] = len(allocations)
                allocations.append(Allocation(handle=_handle(name, base), bytes=size))
            listed.append(
                IpcTensor(
                    name=name,
                    dtype=str(tensor.dtype).removeprefix("torch."),
                    shape=list(tensor.shape),
                    allocation=numbers[base],
                    offset=tensor.data_ptr() - base,
                )
            )
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return Handles(n=n, device=uuid, allocations=allocations, tensors=listed)


def _handle(name: str, base: int) -> str:
    handle = (ctypes.c_byte * HANDLE_BYTES)()
    try:
        cuda_kernel.call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_ulonglong(base))
    except CudaError as error:
        raise ValueError(
            f"tensor {name}: its memory can't be shared ({error}): with torch's allocator this needs "
            "PYTORCH_CUDA_ALLOC_CONF without expandable_segments"
        ) from None
    return base64.b64encode(bytes(handle)).decode()
