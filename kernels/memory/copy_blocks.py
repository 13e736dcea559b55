# SPDX-License-Identifier: Apache-2.0
"""Copies codes and block scales of many weights in one launch, and checks them."""

from collections.abc import Callable, Sequence

import triton
import triton.language as tl
from torch import Tensor

from vllm_fp8ext.kernels.numerics.reference import BLOCK, ScaleFormat
from vllm_fp8ext.kernels.numerics.tile_index import Tiles
from vllm_fp8ext.kernels.quantize.quantize_weights_batched import Destination

_COLUMNS = 9
"""Columns of the table: addresses of the destination's codes and scales, distances of rows of codes (that come, and of the
place) and of scales (likewise), rows and columns, and blocks in all places before."""


@triton.jit
def _copy_blocks(
    table,
    owners,
    sources,
    wrong,
    POW2: tl.constexpr,
    EVEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One program, one block of 128x128, of the weight that `owners` names.

    The name is its row of `table`, and of `sources`, which has the addresses of its codes and scales. `wrong`: 1 where a code
    or the scale is not finite; 1 where the scale can't be served."""
    block = tl.program_id(0)
    wrong_at = wrong + block.to(tl.int64) * 2
    owner = tl.load(owners + block)
    at = table + owner * COLUMNS
    codes = tl.multiple_of(tl.load(sources + owner * 2).to(tl.pointer_type(tl.uint8)), 16)
    scales = tl.load(sources + owner * 2 + 1).to(tl.pointer_type(tl.float32))
    to_codes = tl.multiple_of(tl.load(at).to(tl.pointer_type(tl.uint8)), 16)
    to_scales = tl.load(at + 1).to(tl.pointer_type(tl.float32))
    row, to_row = tl.multiple_of(tl.load(at + 2), 16), tl.multiple_of(tl.load(at + 3), 16)
    height, width = tl.load(at + 6), tl.load(at + 7)
    column_blocks = tl.cdiv(width, SIZE)
    block -= tl.load(at + 8).to(tl.int32)
    row_block, column_block = block // column_blocks, block % column_blocks
    rows = row_block * SIZE + tl.arange(0, SIZE)[:, None]
    columns = column_block * SIZE + tl.arange(0, SIZE)[None, :]
    if EVEN:
        values = tl.load(codes + rows * row + columns)
        tl.store(to_codes + rows * to_row + columns, values)
    else:
        inside = (rows < height) & (columns < width)
        values = tl.load(codes + rows * row + columns, mask=inside, other=0)
        tl.store(to_codes + rows * to_row + columns, values, mask=inside)
    scale = tl.load(scales + row_block * tl.load(at + 4) + column_block)
    tl.store(to_scales + row_block * tl.load(at + 5) + column_block, scale)
    bits = scale.to(tl.int32, bitcast=True)
    infinite = tl.max(tl.max(tl.where((values & 0x7F) == 0x7F, 1, 0), axis=1), axis=0)
    infinite = tl.maximum(infinite, tl.where((bits & 0x7F800000) == 0x7F800000, 1, 0))
    bad = tl.where(scale > 0.0, 0, 1)
    if POW2:
        subnormal = (bits & 0x7F800000) == 0
        fraction = bits & 0x7FFFFF
        bad = tl.maximum(
            bad, tl.where(subnormal, tl.where(fraction & (fraction - 1) == 0, 0, 1), fraction != 0)
        )
    tl.store(wrong_at, infinite.to(tl.float32))
    tl.store(wrong_at + 1, tl.where(infinite != 0, 0, bad).to(tl.float32))


class CopyBlocks:
    """Codes and scales that go to these places, again and again, on one device; `scale_rows`: elements from one row of the
    scales that come to the next. A place's `row` is that of the codes."""

    def __init__(
        self, places: Sequence[Destination], scale_rows: Sequence[int], scale_format: ScaleFormat
    ) -> None:
        self._places = list(places)  # the addresses below are theirs
        self._device = places[0].codes_NK.device
        rows = [
            (
                *(
                    place.codes_NK.data_ptr(),
                    place.scales_NbKb.data_ptr(),
                    place.row,
                    place.codes_NK.stride(0),
                ),
                *(scale_row, place.scales_NbKb.stride(0), *place.codes_NK.shape),
            )
            for place, scale_row in zip(places, scale_rows, strict=True)
        ]
        self._tiles = Tiles([place.blocks for place in places], rows, self._device)
        self._pow2 = scale_format == "pow2"
        self._even = all(place.even for place in places)

    def queue(self, addresses: Tensor, did: Callable[[int], None] | None = None) -> Tensor:
        """Copy from these addresses, int64 `[places, 2]`, of codes (multiples of 16) and of scales; what lies there must stay
        as it is until the current stream has come so far. `did` is called with the bytes of the codes. Returns fp64
        `[places, 2]` on their device: how many blocks hold NaN, or a scale that is not finite; and how many a scale that is
        not positive, or no power of two where all are."""
        tiles = self._tiles
        wrong = tiles.empty(2)
        _copy_blocks[(len(tiles),)](
            *(tiles.table, tiles.owners, addresses.to(self._device, non_blocking=True), wrong),
            POW2=self._pow2,
            EVEN=self._even,
            COLUMNS=_COLUMNS,
            SIZE=BLOCK,
            num_warps=4,
        )
        if did:
            did(sum(place.codes_NK.numel() for place in self._places))
        return tiles.added(wrong)
