# SPDX-License-Identifier: Apache-2.0
"""Quantized activations on their way to a GEMM."""

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_fp8ext.kernels.reference import FP8_DTYPE, blocks


class Quantized(NamedTuple):
    """Activations for an FP8 GEMM.

    `codes`: E4M3 `[M, K]`, contiguous. `scales`: fp32 `[M, ceil(K/128)]`, tokens adjacent and columns a multiple of 16 bytes
    apart, as the copy engine and DeepGEMM want them.
    """

    codes: Tensor
    scales: Tensor


def empty(m: int, k: int, device: torch.device) -> Quantized:
    """Room for `m` tokens of `k` columns."""
    codes = torch.empty(m, k, dtype=FP8_DTYPE, device=device)
    column = -(-m // 4) * 4
    scales = torch.empty_strided((column, blocks(k)), (1, column), dtype=torch.float32, device=device)
    return Quantized(codes, scales if column == m else scales[:m])
