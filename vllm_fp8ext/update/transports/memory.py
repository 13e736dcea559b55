# SPDX-License-Identifier: Apache-2.0
"""Memory in which the tensors of a chunk lie: where, and each of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from vllm_fp8ext.update.contract.safetensors_header import StoredTensor
from vllm_fp8ext.update.transports.read_ahead import Rows


class _Region:
    """Memory of a GPU, as torch takes it."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class Memory(Protocol):
    """Tensors' starts count its bytes."""

    device: torch.device

    def addresses(self, starts: Tensor) -> Tensor:
        """Where the bytes lie at these starts, int64 `[n]` on the host."""

    def read(self, tensor: StoredTensor) -> Tensor:
        """A view of one tensor."""


@dataclass(frozen=True)
class Placed:
    """Tensors that lie on a rank's own GPU, or the whole rows of each."""

    tensors: Sequence[StoredTensor]
    memory: Memory

    def __iter__(self) -> Iterator[Rows]:
        return (Rows(stored, 0, self.memory.read(stored)) for stored in self.tensors)


class Bucket:
    """Memory that one uint8 tensor holds."""

    def __init__(self, data: Tensor) -> None:
        self.device = data.device
        self._data = data

    def addresses(self, starts: Tensor) -> Tensor:
        return starts + self._data.data_ptr()

    def read(self, tensor: StoredTensor) -> Tensor:
        raw = self._data[tensor.start : tensor.start + tensor.size]
        return raw.view(tensor.spec.torch_dtype).view(tensor.spec.shape)


class Allocations:
    """Allocations on one GPU at these addresses, somebody else's, counted through one after the other; `bounds`: where each
    begins, and the end of the last."""

    def __init__(self, device: torch.device, addresses: Sequence[int], bounds: Sequence[int]) -> None:
        self.device = device
        self._begins = torch.tensor(addresses, dtype=torch.int64)
        self._bounds = torch.tensor(bounds, dtype=torch.int64)

    def addresses(self, starts: Tensor) -> Tensor:
        last = len(self._begins) - 1  # of a tensor without elements at the end of all
        numbers = torch.bucketize(starts, self._bounds[1:], right=True).clamp(max=last)
        return self._begins[numbers] + starts - self._bounds[numbers]

    def read(self, tensor: StoredTensor) -> Tensor:
        if not tensor.size:
            return torch.empty(tensor.spec.shape, dtype=tensor.spec.torch_dtype, device=self.device)
        address = int(self.addresses(torch.tensor([tensor.start]))[0])
        with torch.cuda.device(self.device):
            raw = torch.as_tensor(_Region(address, tensor.size), device=self.device)
        return raw.view(tensor.spec.torch_dtype).view(tensor.spec.shape)
