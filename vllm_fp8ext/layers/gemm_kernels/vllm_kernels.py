# SPDX-License-Identifier: Apache-2.0
"""Asks vLLM whether one of its block-FP8 GEMM kernels runs here."""

from functools import cache

from vllm_fp8ext.kernels.numerics.layout import BLOCK

FEATURE: str = "core"
USES: dict[str, tuple[str, ...]] = {
    "choose an FP8 GEMM kernel": (
        "vllm.model_executor.kernels.linear:is_supported_and_can_implement_kernel("
        "kernel, config, compute_capability)",
    ),
}


@cache
def vllm_supports(kernel: str, n: int, k: int, dtype: str) -> bool:
    """Ask vLLM's class of this name.

    `n`, `k`: of the weight `[n, k]`. `dtype`: of activations, as torch names it.
    """
    import torch
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearLayerConfig
    from vllm.model_executor.layers.quantization.utils.quant_utils import (
        GroupShape,
        create_fp8_quant_key,
        kFp8Dynamic128Sym,
    )

    config = FP8ScaledMMLinearLayerConfig(
        weight_quant_key=create_fp8_quant_key(static=True, group_shape=GroupShape(BLOCK, BLOCK)),
        activation_quant_key=kFp8Dynamic128Sym,
        input_dtype=getattr(torch, dtype),
        out_dtype=getattr(torch, dtype),
        weight_shape=(n, k),
    )
    supported, _ = linear.is_supported_and_can_implement_kernel(getattr(linear, kernel), config, None)
    return bool(supported)
