# SPDX-License-Identifier: Apache-2.0
"""The reference linear layer as one opaque operator, so that compilers neither split it nor change its rounding.

The CPU backend runs on it, and so do layers on a GPU whose shape no FP8 kernel takes.
"""

from typing import cast

import torch
from torch import Tensor

from vllm_fp8ext.kernels import reference
from vllm_fp8ext.kernels.reference import ScaleFormat

_LARGEST_SLICE = 1 << 24
"""Activation elements converted at once: bounds the fp32 temporaries to 64 MiB each."""


@torch.library.custom_op("fp8ext::reference_linear", mutates_args=())
def reference_linear(x_MK: Tensor, weight_NK: Tensor, scale_format: str) -> Tensor:
    """Quantize `x_MK` (BF16 or FP16) per token and 128 columns, multiply by a dequantized fp32 weight.

    `weight_NK` is `reference.dequantize_weight` of the served codes. Returns `[M, N]` in the dtype of `x_MK`.
    """
    out = x_MK.new_empty(x_MK.shape[0], weight_NK.shape[0])
    step = max(1, _LARGEST_SLICE // x_MK.shape[1])
    for start in range(0, x_MK.shape[0], step):
        rows = slice(start, start + step)
        quantized = reference.quantize_activation(x_MK[rows], cast("ScaleFormat", scale_format))
        out[rows] = torch.nn.functional.linear(reference.dequantize_activation(*quantized), weight_NK)
    return out


@reference_linear.register_fake
def _(x_MK: Tensor, weight_NK: Tensor, scale_format: str) -> Tensor:
    return x_MK.new_empty(x_MK.shape[0], weight_NK.shape[0])
