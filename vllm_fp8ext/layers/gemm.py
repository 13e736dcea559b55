# SPDX-License-Identifier: Apache-2.0
"""vLLM's block-FP8 GEMM kernels for many tokens, beside our own for few: which of them multiplies by which weight.

Replaces: `init_fp8_linear_kernel`, which may take a kernel that repacks weights, and the quantization of activations that
comes with each of its kernels. Can go once this project has kernels of its own for every shape.
"""

import json
from functools import cache

import torch
import vllm.envs as envs
from torch import Tensor
from vllm.model_executor.kernels import linear as kernels
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearLayerConfig
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    GroupShape,
    create_fp8_quant_key,
    kFp8Dynamic128Sym,
)
from vllm.platforms import current_platform
from vllm.utils.deep_gemm import fp8_gemm_nt

from vllm_fp8ext.config import SECTION, KernelSettings
from vllm_fp8ext.errors import ConfigError
from vllm_fp8ext.kernels.gemm import decode_gemm, selection
from vllm_fp8ext.kernels.gemm.linear import GEMMS
from vllm_fp8ext.kernels.gemm.selection import GemmRoute
from vllm_fp8ext.kernels.numerics.quantized import Quantized
from vllm_fp8ext.kernels.numerics.reference import BLOCK
from vllm_fp8ext.layers.deep_gemm import deep_gemm_runs
from vllm_fp8ext.layers.trials import SHAPE, operands, runs
from vllm_fp8ext.log import log_once

FEATURE: str = "core"
USES: dict[str, tuple[str, ...]] = {
    "choose an FP8 GEMM kernel": (
        "vllm.model_executor.kernels.linear:is_supported_and_can_implement_kernel("
        "kernel, config, compute_capability)",
    ),
    "multiply by FP8 weights on Hopper": (
        "vllm.model_executor.kernels.linear:DeepGemmFp8BlockScaledMMKernel",
    ),
    "multiply by FP8 weights without DeepGEMM": (
        "vllm.model_executor.kernels.linear:CutlassFp8BlockScaledMMKernel",
        "vllm._custom_ops:cutlass_scaled_mm(scale_a, scale_b, out_dtype)",
    ),
    "multiply by FP8 weights without DeepGEMM and CUTLASS": (
        "vllm.model_executor.kernels.linear:TritonFp8BlockScaledMMKernel",
    ),
    "compile that kernel before the server is ready": (
        "vllm.model_executor.layers.quantization.utils.fp8_utils:get_w8a8_block_fp8_configs("
        "N, K, block_n, block_k)",
    ),
}

HOPPER = 90


def deep_gemm(x: Quantized, codes_NK: Tensor, scales_NbKb: Tensor, dtype: torch.dtype) -> Tensor:
    """DeepGEMM with fp32 scales as they are: never requantized to powers of two."""
    out = torch.empty(x.codes.shape[0], codes_NK.shape[0], dtype=dtype, device=x.codes.device)
    fp8_gemm_nt(x, (codes_NK, scales_NbKb), out, is_deep_gemm_e8m0_used=False)
    return out


def cutlass(x: Quantized, codes_NK: Tensor, scales_NbKb: Tensor, dtype: torch.dtype) -> Tensor:
    """vLLM's CUTLASS kernel."""
    from vllm import _custom_ops as ops

    scales = x.scales.t().contiguous().t()
    out: Tensor = ops.cutlass_scaled_mm(
        x.codes, codes_NK.t(), out_dtype=dtype, scale_a=scales, scale_b=scales_NbKb.t()
    )
    return out


_TRITON_ELEMENTS = 2**31 - 1
"""Most of a matrix that vLLM's Triton kernel can tell apart, in 32 bits."""


def triton(x: Quantized, codes_NK: Tensor, scales_NbKb: Tensor, dtype: torch.dtype) -> Tensor:
    """vLLM's Triton kernel, for as many tokens at once as it can tell apart."""
    from vllm.model_executor.layers.quantization.utils.fp8_utils import w8a8_triton_block_scaled_mm

    scales, most = x.scales.contiguous(), _TRITON_ELEMENTS // max(codes_NK.shape)
    parts: list[Tensor] = [
        w8a8_triton_block_scaled_mm(codes, codes_NK, part, scales_NbKb, [BLOCK, BLOCK], dtype)
        for codes, part in zip(x.codes.split(most), scales.split(most), strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def triton_sizes(n: int, k: int) -> dict[int, str]:
    """Sizes of the Triton kernel's blocks, as text, by the number of tokens that vLLM tuned them for on this GPU. Empty where
    it takes the same for all."""
    from vllm.model_executor.layers.quantization.utils.fp8_utils import get_w8a8_block_fp8_configs

    if envs.VLLM_BATCH_INVARIANT:
        return {}
    tuned = get_w8a8_block_fp8_configs(n, k, BLOCK, BLOCK) or {}
    return {count: json.dumps(sizes, sort_keys=True) for count, sizes in tuned.items()}


GEMMS.update({"deep_gemm": deep_gemm, "cutlass": cutlass, "triton": triton})

_KERNELS = {
    "deep_gemm": "DeepGemmFp8BlockScaledMMKernel",
    "cutlass": "CutlassFp8BlockScaledMMKernel",
    "triton": "TritonFp8BlockScaledMMKernel",
}
"""vLLM's class that knows whether a kernel runs here."""


def select(shape_NK: tuple[int, int], dtype: torch.dtype, settings: KernelSettings) -> GemmRoute | None:
    """What multiplies by a weight of this shape, or None where the reference runs (CPUs, shapes that no kernel takes).

    Raises:
        ConfigError: a kernel that the settings name does not take the shape here, or `batch_invariant` can't be kept.
    """
    n, k = shape_NK
    if not current_platform.is_cuda():
        log_once("blockfp8 runs the reference linear layer on this platform")
        return None
    chosen = settings.route(n, k)
    wanted = chosen.decode_tokens != 0 or chosen.gemm in (None, "decode_gemm")
    small_m = (
        dtype == torch.bfloat16
        and wanted
        and not settings.batch_invariant
        and current_platform.is_device_capability(HOPPER)
        and decode_gemm_runs()
    )
    try:
        route = selection.route(
            shape_NK,
            [name for name in selection.MULTIPLES if _takes(name, shape_NK, dtype)],
            small_m=small_m,
            decode_tokens=chosen.decode_tokens,
            gemm=chosen.gemm,
        )
    except ValueError as error:
        raise ConfigError(f'--additional-config "{SECTION}": kernels.shapes: {error}') from None
    if route is None:
        log_once(f"blockfp8 runs the reference linear layer for shape {n}x{k}: no FP8 kernel takes it (slow)")
        return None
    if settings.batch_invariant and route.gemm == "triton" and triton_sizes(n, k):
        raise varies(f"weights of {n}x{k}")
    small = f"decode_gemm up to {route.decode_tokens} tokens, " if route.decode_tokens else ""
    log_once(f"blockfp8 multiplies {n}x{k} by {small}{route.gemm}{' beyond' if small else ''}")
    if route.gemm != "deep_gemm" and chosen.gemm is None:
        log_once(f"blockfp8: DeepGEMM does not take {n}x{k} here, {route.gemm} is the next best")
    return route


def varies(what: str) -> ConfigError:
    """The error of `batch_invariant` where one kernel is left whose sizes change with the number of tokens."""
    return ConfigError(
        f"kernels.batch_invariant: {what} are left to vLLM's Triton kernel here, which chooses its sizes by the number of "
        "tokens: expected VLLM_BATCH_INVARIANT=1, for which it does not, or another kernel"
    )


@cache
def decode_gemm_runs() -> bool:
    """Whether `decode_gemm` was compiled here and has multiplied once; a warning says why not."""

    def multiply() -> None:
        decode_gemm.decode_gemm(*operands(1, *SHAPE), None, "fp32")
        torch.cuda.synchronize()

    return runs("decode_gemm", multiply)


@cache
def _takes(name: str, shape_NK: tuple[int, int], dtype: torch.dtype) -> bool:
    if shape_NK[0] % selection.MULTIPLES[name] or shape_NK[1] % selection.COLUMNS:
        return False
    config = FP8ScaledMMLinearLayerConfig(
        weight_quant_key=create_fp8_quant_key(static=True, group_shape=GroupShape(BLOCK, BLOCK)),
        activation_quant_key=kFp8Dynamic128Sym,
        input_dtype=dtype,
        out_dtype=dtype,
        weight_shape=shape_NK,
    )
    usable, _ = kernels.is_supported_and_can_implement_kernel(getattr(kernels, _KERNELS[name]), config, None)
    return bool(usable) and (name != "deep_gemm" or deep_gemm_runs())
