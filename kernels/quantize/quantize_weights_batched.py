# SPDX-License-Identifier: Apache-2.0
"""Many weights quantized in one launch: an update brings hundreds or thousands, and to look at each by itself costs the host
more time than the GPU needs to quantize it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_fp8ext.kernels.numerics.reference import BLOCK, FP8_DTYPE, UNIT, ScaleFormat, blocks
from vllm_fp8ext.kernels.numerics.tile_index import Tiles
from vllm_fp8ext.kernels.quantize.quantize_weight_triton import DTYPES, programs, write_block

TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
SLICE_BLOCKS = 1 << 15
"""Blocks of one of several launches: a GiB of BF16."""
_COLUMNS = 8
"""Columns of the table: addresses of codes and scales, distances of rows of weight, codes and scales, rows and columns, and
blocks in all weights before."""


@triton.jit
def _quantize_weights(
    table,
    owners,
    weights,
    sums,
    before,
    TYPE: tl.constexpr,
    POW2: tl.constexpr,
    SHORT: tl.constexpr,
    HARDWARE: tl.constexpr,
    EVEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One program, one block of 128x128 of the weight that `owners` names.

    The name is its row of `table`, and of `weights`, which has its address. The block is `before` blocks behind the first.
    """
    block = before + tl.program_id(0)
    sums_at = sums + block.to(tl.int64) * 3
    owner = tl.load(owners + block)
    at = table + owner * COLUMNS
    weight = tl.multiple_of(tl.load(weights + owner).to(tl.pointer_type(TYPE)), 16)
    codes = tl.multiple_of(tl.load(at).to(tl.pointer_type(tl.uint8)), 16)
    scales = tl.load(at + 1).to(tl.pointer_type(tl.float32))
    weight_row = tl.multiple_of(tl.load(at + 2), 16)
    codes_row = tl.multiple_of(tl.load(at + 3), 16)
    height, width = tl.load(at + 5), tl.load(at + 6)
    column_blocks = tl.cdiv(width, SIZE)
    block -= tl.load(at + 7).to(tl.int32)
    row_block, column_block = block // column_blocks, block % column_blocks
    rows = row_block * SIZE + tl.arange(0, SIZE)[:, None]
    columns = column_block * SIZE + tl.arange(0, SIZE)[None, :]
    if EVEN:
        inside = None
        x = tl.load(weight + rows * weight_row + columns)
    else:
        inside = (rows < height) & (columns < width)
        x = tl.load(weight + rows * weight_row + columns, mask=inside, other=0.0)
    codes_at = codes + rows * codes_row + columns
    scale_at = scales + row_block * tl.load(at + 4) + column_block
    write_block(x, codes_at, scale_at, sums_at, inside, POW2, SHORT, HARDWARE, True)


@dataclass(frozen=True, slots=True)
class Destination:
    """Destination of one weight `[N, K]`: codes `[N, K]` and fp32 scales.

    Both may be parts of larger ones. `row`: elements from one row of the weight to the next.
    """

    codes_NK: Tensor
    scales_NbKb: Tensor
    row: int

    def takes(self, dtype: torch.dtype) -> bool:
        """Tell whether a weight of this dtype, or codes, can come together with others."""
        codes, scales = self.codes_NK, self.scales_NbKb
        contiguous = codes.stride(1) == 1 and scales.stride(1) == 1
        aligned = not (codes.data_ptr() % UNIT or codes.stride(0) % UNIT or self.row % UNIT)
        return dtype in (*DTYPES, FP8_DTYPE) and codes.numel() > 0 and contiguous and aligned

    @property
    def blocks(self) -> int:
        rows, columns = self.codes_NK.shape
        return blocks(rows) * blocks(columns)

    @property
    def even(self) -> bool:
        """True if it is made of whole blocks."""
        rows, columns = self.codes_NK.shape
        return rows % BLOCK == 0 and columns % BLOCK == 0


class QuantizeBatched:
    """Weights of one dtype that go to these places, again and again, on one device: all are even, or none has to be. Keeps a
    table of the places there, 4 bytes for each block."""

    def __init__(self, places: Sequence[Destination], dtype: torch.dtype, scale_format: ScaleFormat) -> None:
        self._places = list(places)  # the addresses below are theirs
        self._device = places[0].codes_NK.device
        rows = [
            (
                *(place.codes_NK.data_ptr(), place.scales_NbKb.data_ptr(), place.row),
                *(place.codes_NK.stride(0), place.scales_NbKb.stride(0), *place.codes_NK.shape),
            )
            for place in places
        ]
        self._tiles = Tiles([place.blocks for place in places], rows, self._device)
        self._itemsize = dtype.itemsize
        even = all(place.even for place in places)
        self._programs = programs(dtype, even)
        self._meta = {
            "TYPE": TYPES[dtype],
            "POW2": scale_format == "pow2",
            "SHORT": dtype != torch.float32,
            "HARDWARE": self._device.type == "cuda",
            "EVEN": even,
        }

    def queue(self, addresses: Tensor, did: Callable[[int], None] | None = None) -> Tensor:
        """Quantize the weights at these addresses, int64 `[weights]`, multiples of 16.

        They must stay as they are until the current stream has come so far. `did`: make launches of about a GiB, and call
        this with the bytes of each. Returns fp64 `[weights, 3]` on their device: squared error, squared norm, and how many
        blocks hold NaN or infinity."""
        tiles, blocks = self._tiles, len(self._tiles)
        addresses, sums = addresses.to(self._device, non_blocking=True), tiles.empty(3)
        step = SLICE_BLOCKS if did else blocks
        for before in range(0, blocks, step):
            count = min(step, blocks - before)
            _quantize_weights[(count,)](
                *(tiles.table, tiles.owners, addresses, sums, before),
                **self._meta,
                COLUMNS=_COLUMNS,
                SIZE=BLOCK,
                **self._programs,
            )
            if did:
                did(count * BLOCK * BLOCK * self._itemsize)
        return tiles.added(sums)
