# SPDX-License-Identifier: Apache-2.0
"""Quantized activations on their way to a GEMM."""

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_fp8ext.kernels.numerics.reference import FP8_DTYPE, blocks


class Quantized(NamedTuple):
    """Activations for an FP8 GEMM.

    `codes`: E4M3 `[M, K]`, contiguous. `scales`: fp32 `[M, ceil(K/128)]`, tokens adjacent and columns a multiple of 16 bytes
    apart, as the copy engine and DeepGEMM want them; or by token, contiguous, for a kernel that takes tokens from anywhere.
    """

    codes: Tensor
    scales: Tensor


def empty(m: int, k: int, device: torch.device, *, by_token: bool = False) -> Quantized:
    """Room for `m` tokens of `k` columns."""
    codes = torch.empty(m, k, dtype=FP8_DTYPE, device=device)
    if by_token:
        return Quantized(codes, torch.empty(m, blocks(k), dtype=torch.float32, device=device))
    column = -(-m // 4) * 4
    scales = torch.empty_strided((column, blocks(k)), (1, column), dtype=torch.float32, device=device)
    return Quantized(codes, scales if column == m else scales[:m])
