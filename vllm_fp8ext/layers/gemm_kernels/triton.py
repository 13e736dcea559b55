# SPDX-License-Identifier: Apache-2.0
"""vLLM's Triton kernel for large M: slower, and there wherever Triton is."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from vllm_fp8ext.kernels.gemm.registry import GemmKernel
from vllm_fp8ext.kernels.numerics.layout import BLOCK
from vllm_fp8ext.layers.gemm_kernels.vllm_kernels import vllm_supports

FEATURE: str = "core"
USES: dict[str, tuple[str, ...]] = {
    "multiply by FP8 weights without DeepGEMM and CUTLASS": (
        "vllm.model_executor.kernels.linear:TritonFp8BlockScaledMMKernel",
    ),
    "compile that kernel before the server is ready": (
        "vllm.model_executor.layers.quantization.utils.fp8_utils:get_w8a8_block_fp8_configs("
        "N, K, block_n, block_k)",
    ),
}

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from vllm_fp8ext.kernels.numerics.quantized import Quantized

MOST_ELEMENTS = 2**31 - 1
"""Most elements of a matrix that the kernel can tell apart, in 32 bits."""


def run(x: Quantized, codes_NK: Tensor, scales_NbKb: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply by as many tokens at once as the kernel can tell apart."""
    import torch
    from vllm.model_executor.layers.quantization.utils.fp8_utils import w8a8_triton_block_scaled_mm

    scales, most = x.scales.contiguous(), MOST_ELEMENTS // max(codes_NK.shape)
    slices: list[Tensor] = [
        w8a8_triton_block_scaled_mm(codes, codes_NK, scale, scales_NbKb, [BLOCK, BLOCK], dtype)
        for codes, scale in zip(x.codes.split(most), scales.split(most), strict=True)
    ]
    return slices[0] if len(slices) == 1 else torch.cat(slices)


def supports(n: int, k: int, dtype: str) -> bool:
    """Ask vLLM."""
    return vllm_supports("TritonFp8BlockScaledMMKernel", n, k, dtype)


def block_sizes(n: int, k: int) -> dict[int, str]:
    """Return sizes of the kernel's blocks by the number of tokens they were tuned for.

    Sizes are text, tuned by vLLM on this GPU. Empty where it takes the same for all.
    """
    import vllm.envs as envs
    from vllm.model_executor.layers.quantization.utils.fp8_utils import get_w8a8_block_fp8_configs

    if envs.VLLM_BATCH_INVARIANT:
        return {}
    tuned = get_w8a8_block_fp8_configs(n, k, BLOCK, BLOCK) or {}
    return {count: json.dumps(sizes, sort_keys=True) for count, sizes in tuned.items()}


def warmup_shapes(codes_NK: Tensor, tokens: range) -> Iterable[int]:
    """List one number of tokens for each variant of the kernel that `tokens` can take."""
    return variants(block_sizes(codes_NK.shape[0], codes_NK.shape[1]), tokens)


def variants(sizes: Mapping[int, str], tokens: range) -> list[int]:
    """List one number of tokens for each variant, by `block_sizes`.

    The kernel takes the sizes of the nearest number that was tuned. Triton compiles 1, multiples of 16 and all others apart.
    """
    from vllm_fp8ext.kernels.runtime.launch import compiled_as

    counts: dict[tuple[str, str], int] = {}
    for count in tokens:
        size = sizes[min(sizes, key=lambda tuned: abs(tuned - count))] if sizes else ""
        counts.setdefault((size, compiled_as(count)), count)
    return sorted(counts.values())


def batch_invariant(n: int, k: int) -> bool:
    """Tell whether block sizes are the same for every number of tokens."""
    return not block_sizes(n, k)


TRITON = GemmKernel(
    name="triton",
    title="vLLM's Triton kernel",
    supports=supports,
    run=run,
    warmup_shapes=warmup_shapes,
    rows_multiple=64,
    batch_invariant=batch_invariant,
)
