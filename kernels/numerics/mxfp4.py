# SPDX-License-Identifier: Apache-2.0
"""MXFP4, the format of gpt-oss's released experts: what its codes stand for.

32 values of a row share a scale, a power of two that is stored as its exponent plus 127; two values lie in a byte, the first
in its lower half.
"""

import torch
from torch import Tensor

GROUP = 32
"""Values that share a scale."""
_BIAS = 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)])
"""fp32 `[16]`: what each code stands for."""
_PAIRS = torch.stack([VALUES.repeat(16), VALUES.repeat_interleave(16)], dim=-1)
"""fp32 `[256, 2]`: what the two codes of each byte stand for."""


def dequantize_mxfp4(blocks: Tensor, exponents: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return the values `[…, rows, columns]` that codes and exponents stand for.

    Codes are uint8 `[…, rows, columns/32, 16]`, exponents uint8 `[…, rows, columns/32]`. BF16 holds each value exactly, short
    of the largest exponents.

    Raises:
        ValueError: shapes that do not belong together.
    """
    if blocks.shape[-1] != GROUP // 2 or blocks.shape[:-1] != exponents.shape:
        raise ValueError(
            f"MXFP4: expected codes [..., {GROUP // 2}] and exponents of the other dimensions, found {list(blocks.shape)} "
            f"and {list(exponents.shape)}"
        )
    values = _PAIRS.to(blocks.device)[blocks.int()].flatten(-2)
    return torch.ldexp(values, exponents[..., None].int() - _BIAS).to(dtype).flatten(-2)
