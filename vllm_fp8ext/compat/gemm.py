# SPDX-License-Identifier: Apache-2.0
"""vLLM's block-FP8 GEMM kernels, chosen and set up so that weights are rounded once.

Replaces: `init_fp8_linear_kernel`, which may take a kernel that repacks weights, and DeepGEMM's post-processing, which
requantizes fp32 block scales to powers of two. Can go once this project has kernels of its own for every shape.
"""

import logging
from typing import Any

import torch
from vllm.model_executor.kernels import linear as kernels
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearLayerConfig
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    GroupShape,
    create_fp8_quant_key,
    kFp8Dynamic128Sym,
)
from vllm.platforms import current_platform

from vllm_fp8ext.errors import ConfigError
from vllm_fp8ext.kernels.reference import BLOCK, ScaleFormat

logger = logging.getLogger("vllm.fp8ext")

_CANDIDATES = (
    "DeepGemmFp8BlockScaledMMKernel",
    "CutlassFp8BlockScaledMMKernel",
    "TritonFp8BlockScaledMMKernel",
)
"""Kernels that read the canonical layout, fastest first."""

_logged: set[str] = set()


def select(
    shape_NK: tuple[int, int], input_dtype: torch.dtype, out_dtype: torch.dtype, scale_format: ScaleFormat
) -> Any | None:
    """A kernel for a weight of this shape, or None where the reference runs (CPUs, shapes that no kernel takes)."""
    if not current_platform.is_cuda():
        _log_once("blockfp8 runs the reference linear layer on this platform")
        return None
    config = FP8ScaledMMLinearLayerConfig(
        weight_quant_key=create_fp8_quant_key(static=True, group_shape=GroupShape(BLOCK, BLOCK)),
        activation_quant_key=kFp8Dynamic128Sym,
        input_dtype=input_dtype,
        out_dtype=out_dtype,
        weight_shape=shape_NK,
    )
    for name in _CANDIDATES:
        kernel_type = getattr(kernels, name)
        multiple = 64 if name.startswith("DeepGemm") else BLOCK
        if shape_NK[0] % multiple or shape_NK[1] % BLOCK:
            continue
        usable, _ = kernels.is_supported_and_can_implement_kernel(kernel_type, config, None)
        if not usable:
            continue
        kernel = kernel_type(config)
        kernel.quant_fp8.use_ue8m0 = scale_format == "pow2"
        if hasattr(kernel, "use_deep_gemm_e8m0"):
            kernel.use_deep_gemm_e8m0 = False
        _log_once(f"blockfp8 runs {name}")
        return kernel
    _log_once(f"blockfp8 runs the reference linear layer for shape {shape_NK}: no FP8 kernel takes it (slow)")
    return None


def attach(kernel: Any, layer: torch.nn.Module) -> None:
    """Let a kernel take over a layer's codes and scales; their layout must stay the canonical one."""
    before = _layout(layer)
    kernel.process_weights_after_loading(layer)
    if _layout(layer) != before:
        raise ConfigError(
            f"{type(kernel).__name__} changed the weight layout from {before} to {_layout(layer)}; "
            "blockfp8 exchanges weights in the canonical layout only"
        )


def _layout(layer: torch.nn.Module) -> tuple[Any, ...]:
    tensors = (layer.weight, layer.weight_scale_inv)
    return tuple((tuple(t.shape), tuple(t.stride()), t.dtype) for t in tensors)


def _log_once(message: str) -> None:
    if message not in _logged:
        _logged.add(message)
        logger.info(message)
