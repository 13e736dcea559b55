# SPDX-License-Identifier: Apache-2.0
"""Linear layers as opaque operators: compilers neither split them nor change their rounding.

Each looks at the number of tokens when it runs and takes the kernel that its caller chose for so many. Three take
what comes before the layer along, so that activations are quantized where they are made; one takes them quantized.
"""

from typing import cast

import torch
from torch import Tensor

from vllm_fp8ext.kernels.gemm import decode_gemm
from vllm_fp8ext.kernels.gemm.registry import GEMM_KERNELS
from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.numerics.quantized import Quantized, empty
from vllm_fp8ext.kernels.numerics.reference import FP8_DTYPE, ScaleFormat, blocks
from vllm_fp8ext.kernels.runtime.operators import operator

_LARGEST_SLICE = 1 << 24
"""Activation elements converted at once: bounds the fp32 temporaries to 64 MiB each."""


def _like_linear(x_MK: Tensor, codes_NK: Tensor, *_rest: object) -> Tensor:
    return x_MK.new_empty(x_MK.shape[0], codes_NK.shape[0])


def _like_rmsnorm_linear(
    x_MK: Tensor,
    residual_MK: Tensor | None,
    _norm_K: Tensor,
    _epsilon: float,
    codes_NK: Tensor,
    *_rest: object,
) -> tuple[Tensor, Tensor]:
    added = x_MK.new_empty(0) if residual_MK is None else x_MK.new_empty(x_MK.shape)
    return x_MK.new_empty(x_MK.shape[0], codes_NK.shape[0]), added


def _like_quantized_room(x_MK: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    m = x_MK.shape[0]
    scales = x_MK.new_empty_strided((m, blocks(columns)), (1, (m + 3) // 4 * 4), dtype=torch.float32)
    return x_MK.new_empty(m, columns, dtype=FP8_DTYPE), scales


def _like_quantized_linear(
    x_codes_MK: Tensor, _x_scales_MKb: Tensor, codes_NK: Tensor, *_rest: object
) -> Tensor:
    return x_codes_MK.new_empty(x_codes_MK.shape[0], codes_NK.shape[0], dtype=torch.bfloat16)


def _like_gated_linear(gate_up_M2K: Tensor, _activation: str, codes_NK: Tensor, *_rest: object) -> Tensor:
    return gate_up_M2K.new_empty(gate_up_M2K.shape[0], codes_NK.shape[0])


@operator(_like_linear)
def linear(
    x_MK: Tensor,
    codes_NK: Tensor,
    scales_NbKb: Tensor,
    bias_N: Tensor | None,
    scale_format: str,
    decode_tokens: int,
    gemm: str,
) -> Tensor:
    """Multiply: `x @ weight.T (+ bias)` `[M, N]` in the dtype of `x_MK`.

    Activations are quantized per token and 128 columns. Up to `decode_tokens` tokens (BF16 then) are taken by `decode_gemm`,
    more by `GEMM_KERNELS[gemm]`; more than `decode_gemm.PROLOGUE_TOKENS` are quantized before.
    A weight may have columns of zeros behind those of `x_MK`, up to a multiple of 128 columns.
    """
    from vllm_fp8ext.kernels.quantize.quantize_activation import quantize_activation

    form = cast("ScaleFormat", scale_format)
    if 0 < x_MK.shape[0] <= min(decode_tokens, decode_gemm.PROLOGUE_TOKENS):
        if not decode_gemm.aligned(x_MK):  # one row is contiguous wherever it begins
            x_MK = x_MK.clone(memory_format=torch.contiguous_format)
        if x_MK.shape[1] != codes_NK.shape[1]:  # it reads rows that lie apart
            codes_NK = codes_NK[:, : x_MK.shape[1]]
        return decode_gemm.decode_gemm(x_MK, codes_NK, scales_NbKb, bias_N, form)
    quantized = quantize_activation(_in_rows(x_MK), form, width=codes_NK.shape[1])
    return _quantized(quantized, codes_NK, scales_NbKb, bias_N, decode_tokens, gemm, x_MK.dtype)


@operator(_like_rmsnorm_linear)
def rmsnorm_linear(
    x_MK: Tensor,
    residual_MK: Tensor | None,
    norm_K: Tensor,
    epsilon: float,
    codes_NK: Tensor,
    scales_NbKb: Tensor,
    bias_N: Tensor | None,
    scale_format: str,
    decode_tokens: int,
    gemm: str,
    adds_one: bool = False,
) -> tuple[Tensor, Tensor]:
    """Apply `linear` to the RMSNorm of `x_MK (+ residual_MK)`.

    Returns the product and that sum, the new residual, which is empty without a residual. `adds_one`: the norm multiplies by
    `1 + norm_K`.
    """
    from vllm_fp8ext.kernels.quantize.rmsnorm_quantize import rmsnorm_quantize

    residual_MK = None if residual_MK is None else _in_rows(residual_MK)
    form, small_m = cast("ScaleFormat", scale_format), x_MK.shape[0] <= decode_tokens
    quantized, added = rmsnorm_quantize(
        *(_in_rows(x_MK), residual_MK, norm_K, epsilon, form),
        small_m=small_m,
        adds_one=adds_one,
        width=codes_NK.shape[1],
    )
    out = _quantized(quantized, codes_NK, scales_NbKb, bias_N, decode_tokens, gemm, x_MK.dtype)
    return out, x_MK.new_empty(0) if residual_MK is None else added


@operator(_like_gated_linear)
def gated_linear(
    gate_up_M2K: Tensor,
    activation: str,
    codes_NK: Tensor,
    scales_NbKb: Tensor,
    bias_N: Tensor | None,
    scale_format: str,
    decode_tokens: int,
    gemm: str,
) -> Tensor:
    """`linear` of `activation(gate) * up`; `activation` as in `gated_quantize`."""
    from vllm_fp8ext.kernels.quantize.gated_quantize import Activation, gated_quantize

    quantized = gated_quantize(
        *(_in_rows(gate_up_M2K), cast("Activation", activation), cast("ScaleFormat", scale_format)),
        width=codes_NK.shape[1],
    )
    return _quantized(quantized, codes_NK, scales_NbKb, bias_N, decode_tokens, gemm, gate_up_M2K.dtype)


@operator(_like_quantized_room)
def quantized_room(x_MK: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Codes and scales, uninitialized, of as many tokens as `x_MK` has, for `quantized_linear`."""
    return empty(x_MK.shape[0], columns, x_MK.device)


@operator(_like_quantized_linear)
def quantized_linear(
    x_codes_MK: Tensor,
    x_scales_MKb: Tensor,
    codes_NK: Tensor,
    scales_NbKb: Tensor,
    bias_N: Tensor | None,
    decode_tokens: int,
    gemm: str,
) -> Tensor:
    """`linear` of activations that are quantized already, BF16."""
    x = Quantized(x_codes_MK, x_scales_MKb)
    return _quantized(x, codes_NK, scales_NbKb, bias_N, decode_tokens, gemm, torch.bfloat16)


def _in_rows(x: Tensor) -> Tensor:
    """As kernels read it: compilers may choose how their own tensors lie."""
    return x if x.stride(1) == 1 else x.contiguous()


def _quantized(
    x: Quantized,
    codes_NK: Tensor,
    scales_NbKb: Tensor,
    bias_N: Tensor | None,
    decode_tokens: int,
    gemm: str,
    dtype: torch.dtype,
) -> Tensor:
    if 0 < x.codes.shape[0] <= decode_tokens:
        return decode_gemm.decode_gemm(x, codes_NK, scales_NbKb, bias_N, "fp32")
    return _large_m(x, codes_NK, scales_NbKb, bias_N, gemm, dtype)


def _large_m(
    x: Quantized,
    codes_NK: Tensor,
    scales_NbKb: Tensor,
    bias_N: Tensor | None,
    gemm: str,
    dtype: torch.dtype,
) -> Tensor:
    if not x.codes.shape[0]:
        return x.codes.new_empty(0, codes_NK.shape[0], dtype=dtype)
    out = GEMM_KERNELS[gemm].run(x, codes_NK, scales_NbKb, dtype)
    return out if bias_N is None else out.add_(bias_N)


@operator(_like_linear)
def reference_linear(x_MK: Tensor, weight_NK: Tensor, scale_format: str) -> Tensor:
    """Quantize activations per token and 128 columns, and multiply by a dequantized fp32 weight.

    `x_MK`: BF16 or FP16. `weight_NK` is `reference.dequantize_weight` of the served codes. Returns `[M, N]` in the dtype of
    `x_MK`. The CPU backend runs on it, and so do layers on a GPU whose shape no FP8 kernel takes.
    """
    out = x_MK.new_empty(x_MK.shape[0], weight_NK.shape[0])
    step = max(1, _LARGEST_SLICE // x_MK.shape[1])
    for start in range(0, x_MK.shape[0], step):
        rows = slice(start, start + step)
        quantized = reference.quantize_activation(x_MK[rows], cast("ScaleFormat", scale_format))
        out[rows] = torch.nn.functional.linear(reference.dequantize_activation(*quantized), weight_NK)
    return out
