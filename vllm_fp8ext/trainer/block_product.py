# SPDX-License-Identifier: Apache-2.0
"""Operands in FP8 blocks and their products, by the server's quantizers.

Shape suffixes are those of `kernels.numerics.reference`: N output features, K input features, M tokens, `b` for blocks.
E5M2 is for gradients alone: scales are `amax / 57344`, 1×128, in the formats of `reference.scale_of`.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.numerics.quantized import Quantized
from vllm_fp8ext.kernels.numerics.reference import BLOCK, FP8_MAX, ScaleFormat, blocks
from vllm_fp8ext.kernels.quantize import quantize_weight
from vllm_fp8ext.log import log_once

E5M2_MAX = 57344.0
"""Largest finite E5M2 value."""


class BlockWeight(NamedTuple):
    """Weight `[N, K]` in FP8 blocks, which begin `offset` rows above it.

    `codes`: E4M3 `[N, K]`. `scales`: fp32, one for each block that the rows touch. `offset` is below 128, and 0 unless the
    server fuses the weight with others whose rows are no multiples of 128.
    """

    codes: Tensor
    scales: Tensor
    offset: int = 0

    def values(self) -> Tensor:
        """Return fp32 `[N, K]`: codes times scales."""
        rows, columns = self.codes.shape
        if not self.offset:
            return reference.dequantize_weight(self.codes, self.scales)
        scales = self.scales.repeat_interleave(BLOCK, 0)[self.offset : self.offset + rows]
        return reference.expand(self.codes) * scales.repeat_interleave(BLOCK, 1)[:, :columns]


def quantize_blocks(weight_NK: Tensor, scale_format: ScaleFormat) -> BlockWeight:
    """Quantize a weight of any floating dtype by the server's kernel for its device.

    Raises:
        NonFiniteError: NaN or infinity, on a CPU. On a GPU nothing waits for the values: their scales are not finite either.
    """
    codes, scales = quantize_weight.empty_like(weight_NK)
    if codes.is_cuda:
        quantize_weight.queue(weight_NK, codes, scales, scale_format)
    else:
        quantize_weight.quantize_weight(weight_NK, codes, scales, scale_format)
    return BlockWeight(codes, scales)


def quantize_rows(
    x_MK: Tensor, scale_format: ScaleFormat, dtype: torch.dtype = torch.float8_e4m3fn
) -> Quantized:
    """Quantize rows in groups of 128 columns: codes `[M, K]` of `dtype`, fp32 scales `[M, ceil(K/128)]`.

    E4M3 is the server's quantizer of activations for the device, bit for bit.
    """
    if dtype == torch.float8_e5m2:
        return _e5m2_rows(x_MK, scale_format)
    if x_MK.is_cuda:
        from vllm_fp8ext.kernels.quantize.quantize_activation import quantize_activation

        return quantize_activation(x_MK.contiguous(), scale_format)
    return Quantized(*reference.quantize_activation(x_MK, scale_format))


def row_values(x: Quantized) -> Tensor:
    """Return fp32 `[M, K]`: codes of either format times scales."""
    if x.codes.dtype == torch.float8_e4m3fn:
        return reference.dequantize_activation(x.codes, x.scales)
    return x.codes.float() * x.scales.repeat_interleave(BLOCK, 1)[:, : x.codes.shape[1]]


def multiply(x: Quantized, weight: BlockWeight, dtype: torch.dtype, gemm: str = "auto") -> Tensor:
    """Multiply `x @ weight.T`, `[M, N]` of `dtype`, accumulated in fp32.

    `gemm` as in `BlockScaling`. What DeepGEMM does not take (E5M2, an offset, a CPU, columns that are no multiple of 128)
    is multiplied in fp32 of the dequantized operands.

    Raises:
        RuntimeError: `gemm` is `deep_gemm`, which is not installed.
    """
    run = _deep_gemm(required=gemm == "deep_gemm") if x.codes.is_cuda and gemm != "reference" else None
    if run is not None and _fits(x, weight):
        room = x.codes.shape[0], weight.codes.shape[0]
        out = torch.empty(room, dtype=torch.bfloat16, device=x.codes.device)
        run(x, (weight.codes, weight.scales), out, disable_ue8m0_cast=True)
        return out.to(dtype)
    return torch.nn.functional.linear(row_values(x), weight.values()).to(dtype)


def _fits(x: Quantized, weight: BlockWeight) -> bool:
    """Tell whether DeepGEMM takes these operands."""
    (rows, columns), tokens = weight.codes.shape, x.codes.shape[0]
    shaped = tokens > 0 and rows % 64 == 0 and columns % BLOCK == 0 and not weight.offset
    return shaped and x.codes.dtype == torch.float8_e4m3fn


@cache
def _deep_gemm(required: bool) -> Callable[..., Any] | None:
    """Return DeepGEMM's product of FP8 blocks; None where it may be missing, and is."""
    try:
        from deep_gemm import fp8_gemm_nt
    except ImportError as error:
        if required:
            raise RuntimeError("gemm: expected DeepGEMM to be installed (deep_gemm), found none") from error
        log_once("FP8 products of a trainer's layers run in fp32: DeepGEMM is not installed")
        return None
    log_once("FP8 products of a trainer's layers run by DeepGEMM")
    return fp8_gemm_nt


def _e5m2_rows(x_MK: Tensor, scale_format: ScaleFormat) -> Quantized:
    rows, columns = x_MK.shape
    width = blocks(columns) * BLOCK
    padded = torch.nn.functional.pad(x_MK.float(), (0, width - columns))
    groups = padded.view(rows, blocks(columns), BLOCK)
    # scales for a largest magnitude of 448 are 128 times those for 57344, exactly
    scales = reference.scale_of(groups.abs().amax(2), scale_format) * (FP8_MAX / E5M2_MAX)
    codes = (groups / scales[:, :, None]).clamp(-E5M2_MAX, E5M2_MAX).to(torch.float8_e5m2)
    return Quantized(codes.view(rows, width)[:, :columns].contiguous(), scales)
