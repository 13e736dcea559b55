# SPDX-License-Identifier: Apache-2.0
"""Copies many tensors in one launch, each to its destination.

NaN and infinity are counted on the way. Tensors are norms, biases and embeddings of an update.
"""

from collections.abc import Callable, Sequence

import triton
import triton.language as tl
from torch import Tensor

from vllm_fp8ext.kernels.numerics.reference import UNIT
from vllm_fp8ext.kernels.numerics.tile_index import Tiles
from vllm_fp8ext.kernels.quantize.quantize_weights_batched import TYPES

_TILE = 1 << 13
"""Elements that a program copies."""
_COLUMNS = 3
"""Columns of the table: address of the destination, elements, and tiles in all destinations before."""


@triton.jit
def _copy_values(
    table, owners, sources, wrong, TYPE: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr
):
    """One program, one tile of the tensor that `owners` names.

    The name is its row of `table`, and of `sources`, which has its address.
    """
    owner = tl.load(owners + tl.program_id(0))
    at = table + owner * COLUMNS
    source = tl.multiple_of(tl.load(sources + owner).to(tl.pointer_type(TYPE)), 16)
    place = tl.multiple_of(tl.load(at).to(tl.pointer_type(TYPE)), 16)
    offset = (tl.program_id(0) - tl.load(at + 2)) * TILE
    left = tl.load(at + 1) - offset
    here = tl.arange(0, TILE)
    if left >= TILE:
        values = tl.load(source + offset + here)
        tl.store(place + offset + here, values)
    else:
        values = tl.load(source + offset + here, mask=here < left, other=0.0)
        tl.store(place + offset + here, values, mask=here < left)
    wide = values.to(tl.float32)
    tl.store(wrong + tl.program_id(0), tl.max(tl.where(wide - wide == 0.0, 0.0, 1.0)))


def takes(place: Tensor) -> bool:
    """Tell whether a tensor can be copied there together with others."""
    return (
        place.dtype in TYPES and place.numel() > 0 and place.is_contiguous() and not place.data_ptr() % UNIT
    )


class CopyBatched:
    """Tensors of one dtype that go to these places, again and again, on one device."""

    def __init__(self, places: Sequence[Tensor]) -> None:
        self._places = list(places)  # the addresses below are theirs
        counts = [-(-place.numel() // _TILE) for place in places]
        self._device = places[0].device
        self._tiles = Tiles(counts, [(place.data_ptr(), place.numel()) for place in places], self._device)
        self._type = TYPES[places[0].dtype]

    def queue(self, addresses: Tensor, did: Callable[[int], None] | None = None) -> Tensor:
        """Copy from these addresses, int64 `[places]`, multiples of 16; what lies there must stay as it is until the current
        stream has come so far. `did` is called with the bytes. Returns fp64 `[places]` on their device: how many tiles hold
        NaN or infinity."""
        tiles = self._tiles
        wrong = tiles.empty(1)
        _copy_values[(len(tiles),)](
            *(tiles.table, tiles.owners, addresses.to(self._device, non_blocking=True), wrong),
            TYPE=self._type,
            COLUMNS=_COLUMNS,
            TILE=_TILE,
            num_warps=8,
        )
        if did:
            did(sum(place.nbytes for place in self._places))
        return tiles.added(wrong)[:, 0]
