# SPDX-License-Identifier: Apache-2.0
"""Applies RMSNorm and quantizes the result in one launch, with the addition of a residual."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.numerics.quantized import Quantized, empty
from vllm_fp8ext.kernels.numerics.reference import BLOCK, ScaleFormat, blocks
from vllm_fp8ext.kernels.numerics.triton_numerics import quantized, rounded
from vllm_fp8ext.kernels.runtime.launch import TritonLauncher


def rmsnorm_quantize_reference(
    x_MK: Tensor,
    residual_MK: Tensor | None,
    weight_K: Tensor,
    epsilon: float,
    scale_format: ScaleFormat,
    *,
    adds_one: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what the kernel does: vLLM's RMSNorm (`vllm/ir/ops/layernorm.py`: fp32, rounded to the dtype of the weight
    before it, and after it), then `reference.quantize_activation`. Returns codes, scales and the new residual, which is the
    input of the norm, rounded. `adds_one`: the weight is `1 + weight_K`, in fp32."""
    if adds_one:
        weight_K = weight_K.float() + 1.0
    x = x_MK.float()
    if residual_MK is not None:
        x = x + residual_MK.float()
    rounded = x.to(x_MK.dtype)
    x = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + epsilon)
    normed = (x.to(weight_K.dtype) * weight_K).to(x_MK.dtype)
    return *reference.quantize_activation(normed, scale_format), rounded


@triton.jit(do_not_specialize=["scales_column"])
def _rmsnorm_quantize(
    x_MK,
    residual_MK,
    weight_K,
    codes_MK,
    scales_MKb,
    sum_MK,
    K,
    width,
    x_row,
    residual_row,
    scales_column,
    epsilon,
    POW2: tl.constexpr,
    HARDWARE: tl.constexpr,
    EARLY: tl.constexpr,
    ADD: tl.constexpr,
    ADDS_ONE: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One program, one token: `GROUPS` groups of 128 columns at once."""
    token = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, GROUPS)
    columns = groups[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    inside = columns < K
    weight = tl.load(weight_K + columns, mask=inside, other=0.0)
    if ADDS_ONE:
        weight = weight.to(tl.float32) + 1.0
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_MK + token * x_row + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(residual_MK + token * residual_row + columns, mask=inside, other=0.0).to(tl.float32)
        sums = rounded(x, sum_MK.dtype.element_ty, HARDWARE)
        tl.store(sum_MK + token * K + columns, sums.to(sum_MK.dtype.element_ty), mask=inside)
    mean = tl.sum(tl.sum(x * x, axis=1), axis=0) / K
    normed = rounded(x * tl.div_rn(1.0, tl.sqrt_rn(mean + epsilon)), weight.dtype, HARDWARE)
    values = rounded(normed * weight.to(tl.float32), x_MK.dtype.element_ty, HARDWARE)
    codes, scale = quantized(values.to(x_MK.dtype.element_ty), POW2, True, HARDWARE)
    tl.store(codes_MK + token * width + columns, codes, mask=columns < width)
    tl.store(scales_MKb + token + groups * scales_column, scale, mask=groups < tl.cdiv(K, SIZE))


_launch = TritonLauncher(_rmsnorm_quantize, registers=128)
_MOST_WARPS = 16
"""For a token: of 5,120 columns, 32 took longer with 8 tokens as with 64."""


def rmsnorm_quantize(
    x_MK: Tensor,
    residual_MK: Tensor | None,
    weight_K: Tensor,
    epsilon: float,
    scale_format: ScaleFormat,
    *,
    small_m: bool = False,
    adds_one: bool = False,
    width: int | None = None,
) -> tuple[Quantized, Tensor]:
    """Norm and quantize: returns codes and scales, and the new residual `[M, K]`.

    `x_MK`, `residual_MK`: BF16 or FP16, columns contiguous; without a residual the new one is `x_MK` itself. `small_m`: take
    up to twice as many warps, which are done with a token sooner but load less at once of many; squares are added in another
    order. `adds_one`: the weight is `1 + weight_K`, as in Gemma's norms, and nothing is rounded before it. `width`: as of
    `quantize_activation`.
    """
    m, k = x_MK.shape
    codes, scales = empty(m, k if width is None else width, x_MK.device)
    early = x_MK.is_cuda
    added = x_MK if residual_MK is None else torch.empty(m, k, dtype=x_MK.dtype, device=x_MK.device)
    groups = triton.next_power_of_2(blocks(k))
    if m:
        add = residual_MK is not None
        summand = x_MK if residual_MK is None else residual_MK
        _launch(
            (m, 1, 1),
            (x_MK, summand, weight_K, codes.view(torch.uint8), scales, added),
            (k, codes.shape[1], x_MK.stride(0), summand.stride(0)),
            (scales.stride(1), epsilon),
            (scale_format == "pow2", early, early, add, adds_one, groups, BLOCK),
            min(_MOST_WARPS, max(1, groups * BLOCK // (256 if small_m else 512))),
        )
    return Quantized(codes, scales), added
