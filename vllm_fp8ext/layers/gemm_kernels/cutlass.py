# SPDX-License-Identifier: Apache-2.0
"""vLLM's CUTLASS kernel for large M."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_fp8ext.kernels.gemm.registry import GemmKernel
from vllm_fp8ext.layers.gemm_kernels.vllm_kernels import vllm_supports

FEATURE: str = "core"
USES: dict[str, tuple[str, ...]] = {
    "multiply by FP8 weights without DeepGEMM": (
        "vllm.model_executor.kernels.linear:CutlassFp8BlockScaledMMKernel",
        "vllm._custom_ops:cutlass_scaled_mm(scale_a, scale_b, out_dtype)",
    ),
}

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from vllm_fp8ext.kernels.numerics.quantized import Quantized


def run(x: Quantized, codes_NK: Tensor, scales_NbKb: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply, with the scales of activations laid out as the kernel wants them."""
    from vllm import _custom_ops

    scales = x.scales.t().contiguous().t()
    out: Tensor = _custom_ops.cutlass_scaled_mm(
        x.codes, codes_NK.t(), out_dtype=dtype, scale_a=scales, scale_b=scales_NbKb.t()
    )
    return out


def supports(n: int, k: int, dtype: str) -> bool:
    """Ask vLLM."""
    return vllm_supports("CutlassFp8BlockScaledMMKernel", n, k, dtype)


CUTLASS = GemmKernel(name="cutlass", title="CUTLASS", supports=supports, run=run)
