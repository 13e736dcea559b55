# SPDX-License-Identifier: Apache-2.0
"""Weight quantization straight into its destination: the one path of load, update and digest."""

import torch
from torch import Tensor

from vllm_fp8ext.kernels import reference
from vllm_fp8ext.kernels.reference import BLOCK, ScaleFormat

_SLICE_ELEMENTS = 1 << 22
"""Elements quantized at once: bounds each fp32 temporary to 16 MiB."""


def empty_like(weight_NK: Tensor, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Uninitialized codes and scales for a weight of this shape, on its device unless another is named."""
    rows, columns = weight_NK.shape
    where = weight_NK.device if device is None else device
    codes = torch.empty(rows, columns, dtype=reference.FP8_DTYPE, device=where)
    scales = torch.empty(reference.blocks(rows), reference.blocks(columns), dtype=torch.float32, device=where)
    return codes, scales


def quantize_weight(
    weight_NK: Tensor, codes_NK: Tensor, scales_NbKb: Tensor, scale_format: ScaleFormat
) -> tuple[float, float]:
    """Quantize `weight_NK` into `codes_NK` and `scales_NbKb` (`reference.quantize_weight`, bit for bit).

    The weight may be of any floating dtype on any device; the work is done where the codes are, a few rows at a time, so
    that the extra memory stays under 150 MiB whatever the size of the layer. Returns the squared quantization error and
    the squared norm of the weight.

    Raises:
        NonFiniteError: NaN or infinity; rows before it are already written.
    """
    rows, columns = weight_NK.shape
    step = max(1, _SLICE_ELEMENTS // (columns * BLOCK)) * BLOCK
    sums = torch.zeros(2, dtype=torch.float64, device=codes_NK.device)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        source = weight_NK[start:stop].to(codes_NK.device)
        codes, scales = reference.quantize_weight(source, scale_format)
        codes_NK[start:stop] = codes
        scales_NbKb[start // BLOCK : reference.blocks(stop)] = scales
        values = source.float()
        sums[0] += (reference.dequantize_weight(codes, scales) - values).square().sum()
        sums[1] += values.square().sum()
    error, norm = sums.tolist()
    return error, norm
