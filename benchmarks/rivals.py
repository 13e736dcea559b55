# SPDX-License-Identifier: Apache-2.0
"""Other people's FP8 GEMMs over the same operands, where they can be imported. Each quantizes its activations first."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from vllm_fp8ext.kernels.quantize_activation import quantize_activation

Gemm = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`(x_MK, codes_NK, scales_NbKb)` → BF16 `[M, N]`."""
NAMES = ("scaled_mm", "cutlass", "deep_gemm")
"""DeepGEMM compiles each shape when it first meets it, which takes about 10 s."""


def rivals(names: Iterable[str]) -> dict[str, Gemm | str]:
    """By name: the GEMM, or why it is not here."""
    makers = {"scaled_mm": _scaled_mm, "cutlass": _cutlass, "deep_gemm": _deep_gemm}
    found: dict[str, Gemm | str] = {}
    for name in names:
        try:
            found[name] = makers[name]()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[:200]
    return found


def _scaled_mm() -> Gemm:
    def gemm(x_MK: Tensor, codes_NK: Tensor, scales_NbKb: Tensor) -> Tensor:
        codes, scales = quantize_activation(x_MK, "fp32")
        return torch._scaled_mm(
            codes,
            codes_NK.t(),
            scale_a=scales.t().contiguous().t(),
            scale_b=scales_NbKb.t(),
            out_dtype=torch.bfloat16,
        )

    return gemm


def _cutlass() -> Gemm:
    from vllm import _custom_ops

    quantize = _stock_quantizer(aligned=False)

    def gemm(x_MK: Tensor, codes_NK: Tensor, scales_NbKb: Tensor) -> Tensor:
        codes, scales = quantize(x_MK)
        return _custom_ops.cutlass_scaled_mm(
            codes, codes_NK.t(), scale_a=scales, scale_b=scales_NbKb.t(), out_dtype=torch.bfloat16
        )

    return gemm


def _deep_gemm() -> Gemm:
    from vllm.utils.deep_gemm import fp8_gemm_nt

    quantize = _stock_quantizer(aligned=True)

    def gemm(x_MK: Tensor, codes_NK: Tensor, scales_NbKb: Tensor) -> Tensor:
        out = torch.empty(x_MK.shape[0], codes_NK.shape[0], dtype=torch.bfloat16, device=x_MK.device)
        fp8_gemm_nt(quantize(x_MK), (codes_NK, scales_NbKb), out, is_deep_gemm_e8m0_used=False)
        return out

    return gemm


def _stock_quantizer(aligned: bool) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """vLLM's own, with the layout of the scales that these GEMMs want."""
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    def quantize(x_MK: Tensor) -> tuple[Tensor, Tensor]:
        return per_token_group_quant_fp8(
            x_MK, 128, column_major_scales=True, tma_aligned_scales=aligned, use_ue8m0=False
        )

    return quantize
