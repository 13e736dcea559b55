# SPDX-License-Identifier: Apache-2.0
"""Operands in FP8 blocks and their products, by the server's quantizers.

On a GPU each operand is made by one launch, as on a CPU, bit for bit: quantized, transposed, dequantized. Products run by
DeepGEMM, by `block_gemm` what that does not take, and in fp32 where neither is there.

Shape suffixes are those of `kernels.numerics.reference`: N output features, K input features, M tokens, `b` for blocks.
E5M2 is for gradients alone: scales are `amax / 57344`, 1×128, in the formats of `reference.scale_of`.
"""

import contextlib
import importlib
import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.numerics.quantized import Quantized
from vllm_fp8ext.kernels.numerics.reference import BLOCK, FP8_DTYPE, FP8_MAX, ScaleFormat, blocks
from vllm_fp8ext.kernels.quantize import quantize_weight
from vllm_fp8ext.log import log_once

E5M2_MAX = 57344.0
"""Largest finite E5M2 value."""
_DEEP_GEMM = "deep_gemm", "vllm.third_party.deep_gemm"
"""Modules that are DeepGEMM: its package, and the copy that vLLM brings, where it is installed."""


def runs_kernels(operand: Tensor) -> bool:
    """Tell whether Triton's kernels take an operand, rather than torch."""
    return operand.is_cuda and _triton()


@cache
def _triton() -> bool:
    return importlib.util.find_spec("triton") is not None


class BlockWeight(NamedTuple):
    """Weight `[N, K]` in FP8 blocks, which begin `offset` rows above it.

    `codes`: E4M3 `[N, K]`. `scales`: fp32, one for each block that the rows touch. `offset` is below 128, and 0 unless the
    server fuses the weight with others whose rows are no multiples of 128.
    """

    codes: Tensor
    scales: Tensor
    offset: int = 0

    def values(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return `[N, K]` of a dtype: codes times scales in fp32, rounded once."""
        if runs_kernels(self.codes):
            from vllm_fp8ext.kernels.quantize.dequantize import dequantize

            return dequantize(self.codes, self.scales, dtype, rows=BLOCK, offset=self.offset)
        rows, columns = self.codes.shape
        if not self.offset:
            return reference.dequantize_weight(self.codes, self.scales).to(dtype)
        scales = self.scales.repeat_interleave(BLOCK, 0)[self.offset : self.offset + rows]
        return (reference.expand(self.codes) * scales.repeat_interleave(BLOCK, 1)[:, :columns]).to(dtype)

    def transposed(self) -> "BlockWeight":
        """Return `[K, N]` in the same blocks, which begin with the weight's first row."""
        assert not self.offset
        if runs_kernels(self.codes):
            from vllm_fp8ext.kernels.quantize.transpose_blocks import transpose_weight

            return BlockWeight(*transpose_weight(self.codes, self.scales))
        return BlockWeight(self.codes.T.contiguous(), self.scales.T.contiguous())


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


def quantize_rows(x_MK: Tensor, scale_format: ScaleFormat, dtype: torch.dtype = FP8_DTYPE) -> Quantized:
    """Quantize rows in groups of 128 columns: codes `[M, K]` of `dtype`, fp32 scales `[M, ceil(K/128)]`.

    E4M3 is the server's quantizer of activations for the device, bit for bit.
    """
    if runs_kernels(x_MK):
        from vllm_fp8ext.kernels.quantize import quantize_gradient
        from vllm_fp8ext.kernels.quantize.quantize_activation import quantize_activation

        if dtype == FP8_DTYPE:
            return quantize_activation(x_MK.contiguous(), scale_format)
        return quantize_gradient.quantize_rows(x_MK, scale_format, dtype)
    if dtype == torch.float8_e5m2:
        return _e5m2_rows(x_MK, scale_format)
    return Quantized(*reference.quantize_activation(x_MK, scale_format))


def quantize_columns(x_MN: Tensor, scale_format: ScaleFormat, dtype: torch.dtype = FP8_DTYPE) -> Quantized:
    """Quantize the transpose in groups of 128 tokens: codes `[N, M]` of `dtype`, fp32 scales `[N, ceil(M/128)]`.

    By kernels M is padded to a multiple of 128; codes behind the last token are zero.
    """
    if runs_kernels(x_MN):
        from vllm_fp8ext.kernels.quantize import quantize_gradient

        return quantize_gradient.quantize_columns(x_MN, scale_format, dtype)
    return quantize_rows(x_MN.T.contiguous(), scale_format, dtype)


def transposed_blocks(x: Quantized, scale_format: ScaleFormat) -> BlockWeight:
    """Quantize the values of E4M3 activations again, transposed, in blocks of 128×128: `[K, M]`.

    M is padded as by `quantize_columns`. NaN makes gradients NaN, as in other precisions, and raises nothing.
    """
    if runs_kernels(x.codes):
        from vllm_fp8ext.kernels.quantize.transpose_blocks import requantize_transposed

        return BlockWeight(*requantize_transposed(x, scale_format))
    x_KM = row_values(x).T.contiguous()
    if x_KM.is_cuda or bool(torch.isfinite(x_KM).all()):
        return quantize_blocks(x_KM, scale_format)
    return BlockWeight(
        torch.zeros_like(x_KM, dtype=FP8_DTYPE),
        torch.full((blocks(x_KM.shape[0]), blocks(x_KM.shape[1])), torch.nan, device=x_KM.device),
    )


def row_values(x: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return `[M, K]` of a dtype: codes of either format times scales in fp32, rounded once."""
    if runs_kernels(x.codes):
        from vllm_fp8ext.kernels.quantize.dequantize import dequantize

        return dequantize(*x, dtype)
    if x.codes.dtype == FP8_DTYPE:
        return reference.dequantize_activation(x.codes, x.scales).to(dtype)
    return (x.codes.float() * x.scales.repeat_interleave(BLOCK, 1)[:, : x.codes.shape[1]]).to(dtype)


def multiply(x: Quantized, weight: BlockWeight, dtype: torch.dtype, gemm: str = "auto") -> Tensor:
    """Multiply `x @ weight.T`, `[M, N]` of `dtype`, accumulated in fp32.

    `gemm` as in `BlockScaling`. What DeepGEMM does not take (E5M2, an offset, columns that are no multiple of 128, another
    `dtype` than BF16, to which it rounds) goes to `block_gemm`. On a CPU, and with `reference`, operands are dequantized and
    multiplied in fp32.

    Raises:
        RuntimeError: `gemm` is `deep_gemm`, which is not installed.
    """
    deep_gemm = None
    if x.codes.is_cuda and gemm in ("auto", "deep_gemm"):
        deep_gemm = _deep_gemm(required=gemm == "deep_gemm")
    if deep_gemm is not None and dtype == torch.bfloat16 and _fits(x, weight):
        room = x.codes.shape[0], weight.codes.shape[0]
        out = torch.empty(room, dtype=torch.bfloat16, device=x.codes.device)
        deep_gemm(x, (weight.codes, weight.scales), out, disable_ue8m0_cast=True)
        return out
    if gemm != "reference" and runs_kernels(x.codes):
        from vllm_fp8ext.kernels.gemm.block_gemm import block_gemm

        return block_gemm(x, weight.codes, weight.scales, dtype, offset=weight.offset)
    return nn.functional.linear(row_values(x), weight.values()).to(dtype)


def _fits(x: Quantized, weight: BlockWeight) -> bool:
    """Tell whether DeepGEMM takes these operands."""
    (rows, columns), tokens = weight.codes.shape, x.codes.shape[0]
    shaped = tokens > 0 and rows % 64 == 0 and columns % BLOCK == 0 and not weight.offset
    return shaped and x.codes.dtype == FP8_DTYPE


@cache
def _deep_gemm(required: bool) -> Callable[..., Any] | None:
    """Return DeepGEMM's product of FP8 blocks; None where it may be missing, and is."""
    for name in _DEEP_GEMM:
        with contextlib.suppress(ImportError):
            run: Callable[..., Any] = importlib.import_module(name).fp8_gemm_nt
            log_once(f"FP8 products of a trainer's layers run by DeepGEMM ({name})")
            return run
    if required:
        raise RuntimeError(f"gemm: expected DeepGEMM to be installed ({' or '.join(_DEEP_GEMM)}), found none")
    log_once(
        "FP8 products of a trainer's layers run by this project's Triton kernel: DeepGEMM is not installed"
    )
    return None


def _e5m2_rows(x_MK: Tensor, scale_format: ScaleFormat) -> Quantized:
    rows, columns = x_MK.shape
    width = blocks(columns) * BLOCK
    padded = nn.functional.pad(x_MK.float(), (0, width - columns))
    groups = padded.view(rows, blocks(columns), BLOCK)
    # scales for a largest magnitude of 448 are 128 times those for 57344, exactly
    scales = reference.scale_of(groups.abs().amax(2), scale_format) * (FP8_MAX / E5M2_MAX)
    codes = (groups / scales[:, :, None]).clamp(-E5M2_MAX, E5M2_MAX).to(torch.float8_e5m2)
    return Quantized(codes.view(rows, width)[:, :columns].contiguous(), scales)
