# SPDX-License-Identifier: Apache-2.0
"""Many weights quantized in one launch: an update brings hundreds, and to launch each costs the host more time than the GPU
needs to quantize it."""

from collections import defaultdict

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_fp8ext.kernels.quantize_weight_triton import DTYPES, WARPS, write_block
from vllm_fp8ext.kernels.reference import BLOCK, ScaleFormat, blocks

TOGETHER = 64
"""Weights in a launch: the GPU quantizes these while the host lists the next ones."""
_UNIT = 16
"""What addresses must be a multiple of, in bytes, and distances of rows, in elements."""
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_COLUMNS = 10
"""Of the table: addresses of weight, codes, scales and sums, distances of rows of weight, codes and scales, rows and columns,
and blocks in all weights before."""


@triton.jit
def _quantize_weights(
    table,
    owners,
    TYPE: tl.constexpr,
    POW2: tl.constexpr,
    SHORT: tl.constexpr,
    HARDWARE: tl.constexpr,
    EVEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One program, one block of 128x128, of the weight that `owners` names by its row of `table`."""
    at = table + tl.load(owners + tl.program_id(0)) * COLUMNS
    weight = tl.multiple_of(tl.load(at).to(tl.pointer_type(TYPE)), 16)
    codes = tl.multiple_of(tl.load(at + 1).to(tl.pointer_type(tl.uint8)), 16)
    scales = tl.load(at + 2).to(tl.pointer_type(tl.float32))
    sums = tl.load(at + 3).to(tl.pointer_type(tl.float32))
    weight_row = tl.multiple_of(tl.load(at + 4), 16)
    codes_row = tl.multiple_of(tl.load(at + 5), 16)
    height, width = tl.load(at + 7), tl.load(at + 8)
    column_blocks = tl.cdiv(width, SIZE)
    block = tl.program_id(0) - tl.load(at + 9)
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
    scale_at = scales + row_block * tl.load(at + 6) + column_block
    write_block(x, codes_at, scale_at, sums + block * 3, inside, POW2, SHORT, HARDWARE, True)


class Together:
    """Weights that wait to be quantized together, on the device that they are on. Until `run`, and then until the current
    stream has come so far, they must stay as they are."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[torch.dtype, ScaleFormat, bool], list[tuple[Tensor, ...]]] = defaultdict(
            list
        )

    def add(
        self,
        weight_NK: Tensor,
        codes_NK: Tensor,
        scales_NbKb: Tensor,
        scale_format: ScaleFormat,
        sums_NbKb3: Tensor,
    ) -> bool:
        """What `quantize_weight_triton.launch` does with these, soon: at once when many wait. False: it can't be done
        together with others, for rows that are not aligned or not contiguous."""
        rows, columns = weight_NK.shape
        if weight_NK.dtype not in DTYPES or not weight_NK.numel():
            return False
        for part in (weight_NK, codes_NK):
            if part.data_ptr() % _UNIT or part.stride(0) % _UNIT or part.stride(1) != 1:
                return False
        even = rows % BLOCK == 0 and columns % BLOCK == 0
        waiting = self._waiting[weight_NK.dtype, scale_format, even]
        waiting.append((weight_NK, codes_NK, scales_NbKb, sums_NbKb3))
        if len(waiting) == TOGETHER:
            self.run()
        return True

    def run(self) -> None:
        """Queue on the current stream what waits."""
        for (dtype, scale_format, even), parts in self._waiting.items():
            _launch(dtype, scale_format, even, parts)
        self._waiting.clear()


def _launch(
    dtype: torch.dtype, scale_format: ScaleFormat, even: bool, parts: list[tuple[Tensor, ...]]
) -> None:
    table: list[tuple[int, ...]] = []
    counts, before = [], 0
    for weight, codes, scales, sums in parts:
        addresses = weight.data_ptr(), codes.data_ptr(), scales.data_ptr(), sums.data_ptr()
        distances = weight.stride(0), codes.stride(0), scales.stride(0)
        table.append((*addresses, *distances, *weight.shape, before))
        counts.append(blocks(weight.shape[0]) * blocks(weight.shape[1]))
        before += counts[-1]
    device = parts[0][0].device
    owners = torch.repeat_interleave(torch.tensor(counts).to(device), output_size=before)
    _quantize_weights[(before,)](
        torch.tensor(table).to(device),
        owners,
        TYPE=_TYPES[dtype],
        POW2=scale_format == "pow2",
        SHORT=dtype != torch.float32,
        HARDWARE=device.type == "cuda",
        EVEN=even,
        COLUMNS=_COLUMNS,
        SIZE=BLOCK,
        num_warps=WARPS,
    )
