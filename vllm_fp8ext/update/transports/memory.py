# SPDX-License-Identifier: Apache-2.0
"""Describes memory in which the tensors of a chunk lie."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from vllm_fp8ext.update.contract.safetensors_header import StoredTensor
from vllm_fp8ext.update.transports.read_ahead import TensorRows


class _CudaRegion:
    """Describes memory of a GPU as torch takes it."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class Memory(Protocol):
    """Holds tensors, whose starts count its bytes."""

    device: torch.device

    def addresses(self, starts: Tensor) -> Tensor:
        """Return the addresses of the bytes at these starts, int64 `[n]` on the host."""

    def read(self, tensor: StoredTensor) -> Tensor:
        """Return a view of one tensor."""


@dataclass(frozen=True)
class ResidentTensors:
    """Tensors that lie on a rank's own GPU. Iterating yields the rows of each, whole."""

    tensors: Sequence[StoredTensor]
    memory: Memory

    def __iter__(self) -> Iterator[TensorRows]:
        return (TensorRows(stored, 0, self.memory.read(stored)) for stored in self.tensors)


class BufferMemory:
    """Holds tensors in one uint8 tensor."""

    def __init__(self, data: Tensor) -> None:
        self.device = data.device
        self._data = data

    def addresses(self, starts: Tensor) -> Tensor:
        """Return addresses (`Memory.addresses`)."""
        return starts + self._data.data_ptr()

    def read(self, tensor: StoredTensor) -> Tensor:
        """Return a view (`Memory.read`)."""
        raw = self._data[tensor.start : tensor.start + tensor.size]
        return raw.view(tensor.spec.torch_dtype).view(tensor.spec.shape)


class TensorMemory:
    """Holds contiguous tensors of this process, on one device.

    Their bytes are counted through, one tensor after the other.
    """

    def __init__(self, device: torch.device, tensors: Sequence[Tensor]) -> None:
        self.device = device
        self._raw = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
        self._begins = torch.tensor([raw.data_ptr() for raw in self._raw], dtype=torch.int64)
        self._bounds = torch.tensor([0, *accumulate(raw.numel() for raw in self._raw)], dtype=torch.int64)

    def addresses(self, starts: Tensor) -> Tensor:
        """Return addresses (`Memory.addresses`)."""
        numbers = self._numbers(starts)
        return self._begins[numbers] + starts - self._bounds[numbers]

    def read(self, tensor: StoredTensor) -> Tensor:
        """Return a view (`Memory.read`)."""
        number = int(self._numbers(torch.tensor([tensor.start]))[0])
        start = tensor.start - int(self._bounds[number])
        raw = self._raw[number][start : start + tensor.size]
        return raw.view(tensor.spec.torch_dtype).view(tensor.spec.shape)

    def release(self) -> None:
        """Hold the tensors no more: their owner may close what they lie in."""
        self._raw.clear()

    def _numbers(self, starts: Tensor) -> Tensor:
        last = len(self._begins) - 1  # of a tensor without elements at the end of all
        return torch.bucketize(starts, self._bounds[1:], right=True).clamp(max=last)


class AllocatedMemory:
    """Holds tensors in another process's allocations on one GPU, counted through one after the other.

    `bounds`: where each begins, and the end of the last.
    """

    def __init__(self, device: torch.device, addresses: Sequence[int], bounds: Sequence[int]) -> None:
        self.device = device
        self._begins = torch.tensor(addresses, dtype=torch.int64)
        self._bounds = torch.tensor(bounds, dtype=torch.int64)

    def addresses(self, starts: Tensor) -> Tensor:
        """Return addresses (`Memory.addresses`)."""
        last = len(self._begins) - 1  # of a tensor without elements at the end of all
        numbers = torch.bucketize(starts, self._bounds[1:], right=True).clamp(max=last)
        return self._begins[numbers] + starts - self._bounds[numbers]

    def read(self, tensor: StoredTensor) -> Tensor:
        """Return a view (`Memory.read`)."""
        if not tensor.size:
            return torch.empty(tensor.spec.shape, dtype=tensor.spec.torch_dtype, device=self.device)
        address = int(self.addresses(torch.tensor([tensor.start]))[0])
        with torch.cuda.device(self.device):
            raw = torch.as_tensor(_CudaRegion(address, tensor.size), device=self.device)
        return raw.view(tensor.spec.torch_dtype).view(tensor.spec.shape)
