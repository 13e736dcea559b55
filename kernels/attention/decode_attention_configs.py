# SPDX-License-Identifier: Apache-2.0
"""Tile configs of the decode attention."""

from dataclasses import dataclass, replace

import torch

from vllm_fp8ext.kernels.numerics.reference import FP8_DTYPE
from vllm_fp8ext.kernels.runtime.cuda_kernel import MOST_SHARED_BYTES

_WARPS = 8
_STAGE_VALUES = 4096


@dataclass(frozen=True)
class AttentionTileConfig:
    """How the kernel is built: `together` KV heads and `shares` shares of the work in a block, `stages` tiles in flight for
    each warp, `resident` blocks on a multiprocessor."""

    together: int
    shares: int
    stages: int
    resident: int

    @property
    def warps(self) -> int:
        return self.together * self.shares

    def shared_bytes(self, requests: int, dtype: torch.dtype) -> int:
        # as the kernel lays them out: rings, tiles of each warp, lent blocks, where requests begin
        totals, room = -(-self.warps // 2) * 16, -(-requests // 4) * 4
        return (
            self.warps * self.stages * _STAGE_VALUES * dtype.itemsize + totals + 8 * room + 4 * (requests + 1)
        )


def choose(kv_heads: int, requests: int = 1, dtype: torch.dtype = FP8_DTYPE) -> AttentionTileConfig:
    """Choose the tile config for layers of `kv_heads`.

    `requests`: the most of a step. `dtype`: of the cache.
    """
    together = max(count for count in range(1, _WARPS + 1) if kv_heads % count == 0)
    config = AttentionTileConfig(together, _WARPS // together, stages=3, resident=1)
    fits = config.shared_bytes(requests, dtype) <= MOST_SHARED_BYTES
    return config if fits else replace(config, stages=2)
