# SPDX-License-Identifier: Apache-2.0
"""Tile configs of the decode attention."""

from dataclasses import dataclass, replace

import torch

from vllm_fp8ext.kernels.numerics.reference import FP8_DTYPE
from vllm_fp8ext.kernels.runtime.cuda_kernel import MOST_SHARED_BYTES

_TILE = 16
_WARPS = 8


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

    def shared_bytes(self, requests: int, dtype: torch.dtype, head_size: int = 128) -> int:
        # as the kernel lays them out: rings, tiles of each warp, lent blocks, where requests begin
        totals, room = -(-self.warps // 2) * 16, -(-requests // 4) * 4
        stage_bytes = 2 * _TILE * padded(head_size) * dtype.itemsize
        return self.warps * self.stages * stage_bytes + totals + 8 * room + 4 * (requests + 1)


def padded(head_size: int) -> int:
    """Dimensions of a head in shared memory, a power of two."""
    return 1 << (head_size - 1).bit_length()


def choose(
    kv_heads: int, requests: int = 1, dtype: torch.dtype = FP8_DTYPE, head_size: int = 128, group: int = 1
) -> AttentionTileConfig:
    """Choose the tile config for layers of `kv_heads`.

    `requests`: the most of a step. `dtype`: of the cache. `group`: query heads of a KV head. Small heads have small tiles, of
    which more warps keep as many bytes in flight; the largest ones leave room for half of the warps.
    """
    warps = _WARPS // 2 if head_size * dtype.itemsize > 256 else _WARPS
    together = max(count for count in range(1, warps + 1) if kv_heads % count == 0)
    resident = 2 if head_size == 64 and group <= 8 else 1
    config = AttentionTileConfig(together, warps // together, stages=3, resident=resident)
    fits = config.shared_bytes(requests, dtype, head_size) <= MOST_SHARED_BYTES // resident
    return config if fits else replace(config, stages=2)
