# SPDX-License-Identifier: Apache-2.0
"""Brings memory into the GPU's L2 cache before it is read."""

import triton
import triton.language as tl


@triton.jit
def prefetch_rows(at, columns, last, ROWS: tl.constexpr, LINE: tl.constexpr):
    """Ask for the first `columns` bytes of each of the `ROWS` rows.

    Rows begin at `at` (pointers to bytes); bytes behind `last` are not asked for. Nothing waits for them. Not in Triton's
    interpreter."""
    for first in range(0, columns, 4 * LINE):
        here = tl.minimum(first + tl.arange(0, 4) * LINE, last)
        lines = (at[:, None] + here[None, :]).to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [lines], tl.int32, is_pure=False, pack=1
        )
