# SPDX-License-Identifier: Apache-2.0
"""Rivals over the same operands: other FP8 GEMMs, where they can be imported, and vLLM's kernels."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from vllm_fp8ext.kernels.numerics.reference import BLOCK

Call = Callable[[Tensor], Tensor]
"""`x_MK` → BF16 `[M, N]`."""
Gemm = Callable[[Tensor, Tensor], Call]
"""`(codes_NK, scales_NbKb)`, laid out as the GEMM wants them, → the call that is timed."""
NAMES = ("scaled_mm", "cutlass", "deep_gemm", "flashinfer", "humming")
"""All but Humming's, which reads the activations in BF16, quantize them in each call. DeepGEMM compiles each shape when it
first meets it, about 10 s; FlashInfer compiles for minutes, once."""
UNQUANTIZED = ("humming",)
"""Whose activations stay in BF16."""


def rivals(names: Iterable[str]) -> dict[str, Gemm | str]:
    """GEMMs by name, or why one is not here."""
    makers = {
        "scaled_mm": _scaled_mm,
        "cutlass": _cutlass,
        "deep_gemm": _deep_gemm,
        "flashinfer": _flashinfer,
        "humming": _humming,
    }
    gemms: dict[str, Gemm | str] = {}
    for name in names:
        try:
            gemms[name] = makers[name]()
        except Exception as error:
            gemms[name] = f"{type(error).__name__}: {error}"[:200]
    return gemms


def _scaled_mm() -> Gemm:
    from vllm_fp8ext.kernels.quantize.quantize_activation import quantize_activation

    def gemm(codes_NK: Tensor, scales_NbKb: Tensor) -> Call:
        def call(x_MK: Tensor) -> Tensor:
            codes, scales = quantize_activation(x_MK, "fp32")
            return torch._scaled_mm(
                codes,
                codes_NK.t(),
                scale_a=scales.t().contiguous().t(),
                scale_b=scales_NbKb.t(),
                out_dtype=torch.bfloat16,
            )

        return call

    return gemm


def _cutlass() -> Gemm:
    from vllm import _custom_ops

    quantize = stock_quantizer(aligned=False)

    def gemm(codes_NK: Tensor, scales_NbKb: Tensor) -> Call:
        def call(x_MK: Tensor) -> Tensor:
            codes, scales = quantize(x_MK)
            out: Tensor = _custom_ops.cutlass_scaled_mm(
                codes, codes_NK.t(), scale_a=scales, scale_b=scales_NbKb.t(), out_dtype=torch.bfloat16
            )
            return out

        return call

    return gemm


def _deep_gemm() -> Gemm:
    from vllm.utils.deep_gemm import fp8_gemm_nt

    quantize = stock_quantizer(aligned=True)

    def gemm(codes_NK: Tensor, scales_NbKb: Tensor) -> Call:
        def call(x_MK: Tensor) -> Tensor:
            out = torch.empty(x_MK.shape[0], codes_NK.shape[0], dtype=torch.bfloat16, device=x_MK.device)
            fp8_gemm_nt(quantize(x_MK), (codes_NK, scales_NbKb), out, is_deep_gemm_e8m0_used=False)
            return out

        return call

    return gemm


def _flashinfer() -> Gemm:
    from flashinfer.gemm import fp8_blockscale_gemm_sm90

    def gemm(codes_NK: Tensor, scales_NbKb: Tensor) -> Call:
        def call(x_MK: Tensor) -> Tensor:
            out: Tensor = fp8_blockscale_gemm_sm90(
                x_MK, codes_NK, weight_scale=scales_NbKb, out_dtype=torch.bfloat16
            )
            return out

        return call

    return gemm


def _humming() -> Gemm:
    """As vLLM runs it, with its own layout of the weights."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.kernels.linear.scaled_mm.humming import HummingFP8ScaledMMLinearKernel
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearLayerConfig
    from vllm.model_executor.layers.quantization.utils.quant_utils import (
        GroupShape,
        create_fp8_quant_key,
        kFp8Dynamic128Sym,
    )

    def gemm(codes_NK: Tensor, scales_NbKb: Tensor) -> Call:
        n, k = codes_NK.shape
        config = FP8ScaledMMLinearLayerConfig(
            weight_quant_key=create_fp8_quant_key(static=True, group_shape=GroupShape(BLOCK, BLOCK)),
            activation_quant_key=kFp8Dynamic128Sym,
            input_dtype=torch.bfloat16,
            out_dtype=torch.bfloat16,
            weight_shape=(n, k),
        )
        layer = nn.Module()
        layer.weight = nn.Parameter(codes_NK, requires_grad=False)
        layer.weight_scale_inv = nn.Parameter(scales_NbKb, requires_grad=False)
        layer.input_size_per_partition, layer.output_partition_sizes = k, [n]
        layer.params_dtype, layer.has_bias = torch.bfloat16, False
        with set_current_vllm_config(VllmConfig()):
            kernel = HummingFP8ScaledMMLinearKernel(config, ["weight", "weight_scale_inv", "", ""])
            kernel.process_weights_after_loading(layer)
        return lambda x_MK: kernel.apply_weights(layer, x_MK)

    return gemm


def stock_quantizer(aligned: bool) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """vLLM's own, with the layout of the scales that these GEMMs want."""
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    def quantize(x_MK: Tensor) -> tuple[Tensor, Tensor]:
        quantized: tuple[Tensor, Tensor] = per_token_group_quant_fp8(
            x_MK, 128, column_major_scales=True, tma_aligned_scales=aligned, use_ue8m0=False
        )
        return quantized

    return quantize


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> None:
    """vLLM's kernel, in place: `residual` becomes the sum, `x` its norm."""
    from vllm import _custom_ops

    _custom_ops.fused_add_rms_norm(x, residual, weight, epsilon)


def turn_heads(
    qkv_MN: Tensor,
    positions_M: Tensor,
    cos_sin_PD: Tensor,
    q_norm_D: Tensor,
    k_norm_D: Tensor,
    q_scale: Tensor,
    heads: int,
    kv_heads: int,
) -> Tensor:
    """vLLM's kernels: norm of heads and rotary embedding, in place, then quantization of the queries."""
    from vllm import _custom_ops

    size = cos_sin_PD.shape[1]
    _custom_ops.fused_qk_norm_rope(
        *(qkv_MN, heads, kv_heads, kv_heads, size, 1e-6, q_norm_D, k_norm_D, cos_sin_PD, True, positions_M)
    )
    codes: Tensor = _custom_ops.scaled_fp8_quant(qkv_MN[:, : heads * size], q_scale)[0]
    return codes


def gate(activation: str, out_MK: Tensor, x_M2K: Tensor) -> None:
    """vLLM's kernel of `silu`, `gelu` or `gelu_tanh` of one half times the other."""
    import vllm._custom_ops  # noqa: F401  # registers it

    getattr(torch.ops._C, f"{activation}_and_mul")(out_MK, x_M2K)
