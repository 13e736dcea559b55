# SPDX-License-Identifier: Apache-2.0
"""A vLLM plugin for tests: the two collectives by which data-parallel ranks share out experts, on CPUs.

vLLM's communicator for CPUs has none, so that no mixture of experts can be served there with `--data-parallel-size`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist


def register() -> None:
    """The entry point. Idempotent."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator.all_gatherv = _all_gatherv
    CpuCommunicator.reduce_scatterv = _reduce_scatterv


def _all_gatherv(
    self: Any, input_: Tensor | Sequence[Tensor], dim: int = 0, sizes: list[int] | None = None
) -> Any:
    """Concatenate every rank's rows, of which rank i has `sizes[i]`."""
    assert dim == 0
    if not isinstance(input_, Tensor):
        return [_all_gatherv(self, tensor, dim, sizes) for tensor in input_]
    rows = sizes or [len(input_)] * self.world_size
    padded = input_.new_zeros((max(rows), *input_.shape[1:]))
    padded[: len(input_)] = input_
    parts = [torch.empty_like(padded) for _ in rows]
    dist.all_gather(parts, padded, group=self.device_group)
    return torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)])


def _reduce_scatterv(self: Any, input_: Tensor, dim: int = -1, sizes: list[int] | None = None) -> Tensor:
    """Add all ranks' rows up, and return this rank's."""
    assert dim == 0
    rows = sizes or [len(input_) // self.world_size] * self.world_size
    total = input_.float()
    dist.all_reduce(total, group=self.device_group)
    first = sum(rows[: self.rank_in_group])
    return total[first : first + rows[self.rank_in_group]].to(input_.dtype)
