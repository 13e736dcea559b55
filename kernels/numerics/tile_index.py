# SPDX-License-Identifier: Apache-2.0
"""One launch for many tensors: which program works on which of them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_fp8ext.kernels.numerics import block_sums


class Tiles:
    """`counts`: how many programs each tensor needs; `rows`: integers that these must know of it. On the device: `table`,
    int64 `[tensors, …]`, whose rows get one more column, the number of programs before the tensor's; and `owners`, int32
    `[programs]`, the tensor of each."""

    def __init__(self, counts: Sequence[int], rows: Sequence[Sequence[int]], device: torch.device) -> None:
        numbers = torch.tensor(counts)
        bounds = torch.cat([torch.zeros(1, dtype=torch.int64), numbers.cumsum(0)])
        self.table = torch.cat([torch.tensor(rows), bounds[:-1, None]], 1).to(device)
        self.owners = torch.repeat_interleave(numbers).int().to(device)
        self._bounds = bounds.to(device)

    def __len__(self) -> int:
        """Programs in all."""
        return len(self.owners)

    def empty(self, columns: int) -> Tensor:
        """Room for what each program tells: fp32 `[programs, columns]`."""
        return torch.empty(len(self), columns, dtype=torch.float32, device=self.owners.device)

    def added(self, sums: Tensor) -> Tensor:
        """Add up by tensor: fp64 `[tensors, columns]`."""
        return block_sums.added(sums, self._bounds)
