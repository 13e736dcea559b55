# SPDX-License-Identifier: Apache-2.0
"""CUDA tensors as inter-process handles: the server reads them where they are. Imports no torch: a CUDA tensor can only be
there when it is."""

import base64
import ctypes
from collections.abc import Iterable, Iterator
from typing import Any

from vllm_fp8ext.kernels import cuda
from vllm_fp8ext.kernels.cuda import CudaError
from vllm_fp8ext.serve.client.dense import dense, size_with_scales
from vllm_fp8ext.serve.schema import Allocation, Handles, IpcTensor
from vllm_fp8ext.serve.tensors import TensorLike
from vllm_fp8ext.weights.ipc_source import HANDLE_BYTES
from vllm_fp8ext.weights.manifest import follows


def batches(tensors: Iterable[tuple[str, TensorLike]], limit: float) -> Iterator[list[tuple[str, Any]]]:
    """CUDA tensors of one device, contiguous, in groups of `limit` bytes at most, or of one tensor, with its block scales.

    Raises:
        ValueError: what is no dense torch tensor on a GPU.
    """
    group: list[tuple[str, Any]] = []
    size = 0
    for name, tensor in tensors:
        held = dense(name, tensor, "cuda")
        full = size + size_with_scales(held) > limit
        if group and (held.device != group[0][1].device or (full and not follows(name, group[-1][0]))):
            yield group
            group, size = [], 0
        group.append((name, held))
        size += held.nbytes
    if group:
        yield group


def handles(group: list[tuple[str, Any]], n: int) -> Handles:
    """What tells a server where these tensors are; they must stay as they are until it has answered.

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
            base, size = cuda.allocation_of(tensor.data_ptr())
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
        cuda.call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_ulonglong(base))
    except CudaError as error:
        raise ValueError(
            f"tensor {name}: its memory can't be shared ({error}): with torch's allocator this needs "
            "PYTORCH_CUDA_ALLOC_CONF without expandable_segments"
        ) from None
    return base64.b64encode(bytes(handle)).decode()
