# SPDX-License-Identifier: Apache-2.0
"""Many weights quantized in one launch: an update brings hundreds or thousands, and to look at each by itself costs the host
more time than the GPU needs to quantize it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_fp8ext.kernels import block_sums
from vllm_fp8ext.kernels.quantize_weight_triton import DTYPES, WARPS, write_block
from vllm_fp8ext.kernels.reference import BLOCK, ScaleFormat, blocks

UNIT = 16
"""What addresses must be a multiple of, in bytes, and distances of rows, in elements."""
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_COLUMNS = 8
"""Of the table: addresses of codes and scales, distances of rows of weight, codes and scales, rows and columns, and blocks in
all weights before."""


@triton.jit
def _quantize_weights(
    table,
    owners,
    weights,
    sums,
    TYPE: tl.constexpr,
    POW2: tl.constexpr,
    SHORT: tl.constexpr,
    HARDWARE: tl.constexpr,
    EVEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One program, one block of 128x128, of the weight that `owners` names by its row of `table` and of `weights`, which has
    its address."""
    owner = tl.load(owners + tl.program_id(0))
    at = table + owner * COLUMNS
    weight = tl.multiple_of(tl.load(weights + owner).to(tl.pointer_type(TYPE)), 16)
    codes = tl.multiple_of(tl.load(at).to(tl.pointer_type(tl.uint8)), 16)
    scales = tl.load(at + 1).to(tl.pointer_type(tl.float32))
    weight_row = tl.multiple_of(tl.load(at + 2), 16)
    codes_row = tl.multiple_of(tl.load(at + 3), 16)
    height, width = tl.load(at + 5), tl.load(at + 6)
    column_blocks = tl.cdiv(width, SIZE)
    block = tl.program_id(0) - tl.load(at + 7)
    row_block, column_block = block // column_blocks, block % column_blocks
    rows = row_block * SIZE + tl.arange(0, SIZE)[:, None]
    columns = column_block * SIZE + tl.arange(0, SIZE)[None, :]
    if EVEN:
        inside = None
        x = tl.load(weight + rows * weight_row + columns).to(tl.float32)
    else:
        inside = (rows < height) & (columns < width)
        x = tl.load(weight + rows * weight_row + columns, mask=inside, other=0.0).to(tl.float32)
    codes_at = codes + rows * codes_row + columns
    scale_at = scales + row_block * tl.load(at + 4) + column_block
    sums_at = sums + tl.program_id(0).to(tl.int64) * 3
    write_block(x, codes_at, scale_at, sums_at, inside, POW2, SHORT, HARDWARE, True)


@dataclass(frozen=True, slots=True)
class Place:
    """Where one weight `[N, K]` goes: codes `[N, K]` and fp32 scales, which may be parts of larger ones. `row`: elements from
    one row of the weight to the next."""

    codes_NK: Tensor
    scales_NbKb: Tensor
    row: int

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether a weight of this dtype can be quantized together with others."""
        codes, scales = self.codes_NK, self.scales_NbKb
        contiguous = codes.stride(1) == 1 and scales.stride(1) == 1
        aligned = not (codes.data_ptr() % UNIT or codes.stride(0) % UNIT or self.row % UNIT)
        return dtype in DTYPES and codes.numel() > 0 and contiguous and aligned

    @property
    def blocks(self) -> int:
        rows, columns = self.codes_NK.shape
        return blocks(rows) * blocks(columns)

    @property
    def even(self) -> bool:
        """Whether it is made of whole blocks."""
        rows, columns = self.codes_NK.shape
        return rows % BLOCK == 0 and columns % BLOCK == 0


class QuantizeTogether:
    """Weights of one dtype that go to these places, again and again, on one device: all are even, or none has to be. Keeps a
    table of the places there, 4 bytes for each block."""

    def __init__(self, places: Sequence[Place], dtype: torch.dtype, scale_format: ScaleFormat) -> None:
        self._places = list(places)  # the addresses below are theirs
        device = places[0].codes_NK.device
        counts = torch.tensor([place.blocks for place in places])
        self._bounds = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        rows = [
            (
                *(place.codes_NK.data_ptr(), place.scales_NbKb.data_ptr(), place.row),
                *(place.codes_NK.stride(0), place.scales_NbKb.stride(0), *place.codes_NK.shape, before),
            )
            for place, before in zip(places, self._bounds.tolist(), strict=False)
        ]
        self._table = torch.tensor(rows).to(device)
        self._owners = torch.repeat_interleave(counts).int().to(device)
        self._bounds = self._bounds.to(device)
        self._meta = {
            "TYPE": TYPES[dtype],
            "POW2": scale_format == "pow2",
            "SHORT": dtype != torch.float32,
            "HARDWARE": device.type == "cuda",
            "EVEN": all(place.even for place in places),
        }

    def queue(self, addresses: Tensor) -> Tensor:
        """Quantize the weights at these addresses, int64 `[weights]`, multiples of 16, which must stay as they are until the
        current stream has come so far. Returns fp64 `[weights, 3]` on their device: squared error, squared norm, and how many
        blocks hold NaN or infinity."""
        device = self._table.device
        sums = torch.empty(len(self._owners), 3, dtype=torch.float32, device=device)
        _quantize_weights[(len(self._owners),)](
            *(self._table, self._owners, addresses.to(device), sums),
            **self._meta,
            COLUMNS=_COLUMNS,
            SIZE=BLOCK,
            num_warps=WARPS,
        )
        return block_sums.added(sums, self._bounds)
