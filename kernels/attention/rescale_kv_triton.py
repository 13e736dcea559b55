# SPDX-License-Identifier: Apache-2.0
"""`rescale_kv` on a GPU: one launch for all layers, each code read once and written once.

A row is the head_dim codes of one head of K or V of one token. Within a block rows are taken in the order of their
addresses, so that neighbouring programs move contiguous memory whatever the layout.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_fp8ext.kernels.attention.rescale_kv import CachedLayer, RescaleCounts, counted_range
from vllm_fp8ext.kernels.numerics.triton_numerics import encoded

TILE_BYTES = 1 << 14
"""Bytes that one program rewrites."""
_UNIT = 16
"""Bytes of the widest load."""


@triton.jit(do_not_specialize=["held"])
def _rescale_kv(
    caches,
    changes,
    blocks,
    offsets,
    heads,
    counts,
    held,
    block_stride,
    COUNT: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """One program, `ROWS` of the `COUNT` rows of one block of one layer.

    `caches`: the address of each layer; `changes`: of each layer and head (those of K, then those of V) its ratio and the
    two numbers of `counted_range`; `offsets`, `heads`: of each row of a block.
    """
    program = tl.program_id(0)
    tiles: tl.constexpr = (COUNT + ROWS - 1) // ROWS
    layer = program // tiles // held
    block = tl.load(blocks + program // tiles % held)
    start = (tl.load(caches + layer) + block * block_stride).to(tl.pointer_type(tl.uint8))
    rows = program % tiles * ROWS + tl.arange(0, ROWS)
    inside = rows < COUNT
    offset = tl.load(offsets + rows, mask=inside, other=0)
    change = changes + (layer * HEADS + tl.load(heads + rows, mask=inside, other=0)) * 3
    ratio, middle, half = tl.load(change), tl.load(change + 1), tl.load(change + 2)
    if ALIGNED:
        start = tl.multiple_of(start, 16)
        offset = tl.multiple_of(offset, 16)
    columns = tl.arange(0, PADDED)
    codes = start + offset[:, None] + columns[None, :]
    mask = None
    if COUNT % ROWS != 0 or WIDTH != PADDED:
        mask = inside[:, None] & (columns < WIDTH)[None, :]
        old = tl.load(codes, mask=mask, other=0)
    else:
        old = tl.load(codes)
    values = old.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    exact = values * ratio[:, None]
    new = encoded(exact, HARDWARE)
    if not HARDWARE:  # where a product that is NaN has no sign; the interpreter takes the code of NaN for 480
        new = tl.where((old & 0x7F) == 0x7F, 0x7F, new).to(tl.uint8)
    tl.store(codes, new, mask=mask)
    # one comparison for each code: two would make this kernel wait for comparisons instead of memory
    counted = tl.abs(tl.abs(values) - middle[:, None]) <= half[:, None]
    counted = tl.sum(counted.to(tl.int32), axis=1)
    tl.store(counts + program * 2, tl.sum(tl.where(ratio > 1, counted, 0), axis=0))
    tl.store(counts + program * 2 + 1, tl.sum(tl.where(ratio < 1, counted, 0), axis=0))


@dataclass(frozen=True)
class _Launch:
    """Layers whose caches are laid out alike."""

    caches: Tensor
    changes: Tensor
    offsets: Tensor
    heads: Tensor
    counts: Tensor
    block_stride: int
    head_count: int
    width: int
    rows: int
    aligned: bool


class Rescaling:
    """Layers and blocks (int64 `[B]` on their GPU), as `rescale_kv` has checked them."""

    def __init__(self, layers: Sequence[CachedLayer], blocks: Tensor) -> None:
        self._blocks = blocks
        self._layers = list(layers)  # the addresses below are theirs
        ordered = sorted(self._layers, key=_layout)
        self._launches = [self._prepare(list(alike)) for _, alike in groupby(ordered, key=_layout)]
        self._codes = 2 * sum(len(blocks) * layer.k[0].numel() for layer in self._layers)

    def _prepare(self, layers: list[CachedLayer]) -> _Launch:
        k, v = layers[0].k, layers[0].v
        offsets, heads = _rows(k, v)
        ratios = torch.stack([torch.cat([layer.k_ratio, layer.v_ratio]).cpu() for layer in layers])
        addresses = [layer.k.data_ptr() for layer in layers]
        width = k.shape[3]
        rows = max(1, min(TILE_BYTES // triton.next_power_of_2(width), triton.next_power_of_2(len(offsets))))
        programs = len(layers) * len(self._blocks) * -(-len(offsets) // rows)
        places = [width, k.stride(0), *addresses, *offsets.tolist()]
        return _Launch(
            caches=torch.tensor(addresses, dtype=torch.int64).to(k.device),
            changes=torch.stack([ratios, *counted_range(ratios)], -1).to(k.device),
            offsets=offsets.to(k.device),
            heads=heads.to(k.device),
            counts=torch.empty(programs, 2, dtype=torch.int32, device=k.device),
            block_stride=k.stride(0),
            head_count=ratios.shape[1],
            width=width,
            rows=rows,
            aligned=all(place % _UNIT == 0 for place in places),
        )

    def run(self) -> None:
        """Queue the rewriting on the current stream."""
        for launch in self._launches:
            _rescale_kv[(len(launch.counts),)](
                launch.caches,
                launch.changes,
                self._blocks,
                launch.offsets,
                launch.heads,
                launch.counts,
                len(self._blocks),
                launch.block_stride,
                COUNT=len(launch.offsets),
                HEADS=launch.head_count,
                WIDTH=launch.width,
                PADDED=triton.next_power_of_2(launch.width),
                ROWS=launch.rows,
                ALIGNED=launch.aligned,
                HARDWARE=self._blocks.is_cuda,
                num_warps=8,
            )

    def counts(self) -> RescaleCounts:
        """Return the counts of the last run; waits for it."""
        sums = torch.stack([launch.counts.sum(0, dtype=torch.int64) for launch in self._launches]).sum(0)
        saturated, flushed = sums.tolist()
        return RescaleCounts(self._codes, saturated, flushed)


def _layout(layer: CachedLayer) -> tuple[int, ...]:
    """Equal for layers of one launch."""
    k, v = layer.k, layer.v
    return (*k.shape[1:], *k.stride(), *v.stride(), v.data_ptr() - k.data_ptr())


def _rows(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's distance from the first K of its block, and its head.

    Distances are bytes, ascending, int64. Heads are int32; those of V are counted after those of K.
    """
    tokens, heads = k.shape[1], k.shape[2]
    token, head = torch.arange(tokens)[:, None], torch.arange(heads)[None, :]
    places = [
        (token * cache.stride(1) + head * cache.stride(2) + cache.data_ptr() - k.data_ptr()).flatten()
        for cache in (k, v)
    ]
    owners = [(head + side * heads).expand(tokens, heads).flatten() for side in range(2)]
    offsets, order = torch.cat(places).sort()
    return offsets, torch.cat(owners)[order].int()
