# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM, as vLLM brings it: the fastest kernel for large M on Hopper.

It compiles a kernel for each shape and number of tokens as it first meets them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING

from vllm_fp8ext.kernels.gemm.registry import GemmKernel
from vllm_fp8ext.layers.gemm_kernels.vllm_kernels import vllm_supports

FEATURE: str = "core"
USES: dict[str, tuple[str, ...]] = {
    "multiply by FP8 weights on Hopper": (
        "vllm.model_executor.kernels.linear:DeepGemmFp8BlockScaledMMKernel",
    ),
}

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from vllm_fp8ext.kernels.numerics.quantized import Quantized


@cache
def _fp8_gemm_nt() -> Callable[..., None]:
    from vllm.utils.deep_gemm import fp8_gemm_nt

    return fp8_gemm_nt


def run(x: Quantized, codes_NK: Tensor, scales_NbKb: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply with fp32 scales as they are: never requantized to powers of two."""
    out = x.scales.new_empty(x.codes.shape[0], codes_NK.shape[0], dtype=dtype)
    _fp8_gemm_nt()(x, (codes_NK, scales_NbKb), out, is_deep_gemm_e8m0_used=False)
    return out


def supports(n: int, k: int, dtype: str) -> bool:
    """Ask vLLM first, then multiply once."""
    from vllm_fp8ext.layers.deep_gemm import deep_gemm_runs

    return vllm_supports("DeepGemmFp8BlockScaledMMKernel", n, k, dtype) and deep_gemm_runs()


def warmup_shapes(codes_NK: Tensor, tokens: range) -> Iterable[int]:
    """List numbers of tokens at which DeepGEMM takes another kernel."""
    from vllm_fp8ext.layers.gemm_kernels.deep_gemm_warmup import token_counts

    return token_counts(codes_NK, tokens)


DEEP_GEMM = GemmKernel(
    name="deep_gemm",
    title="DeepGEMM",
    supports=supports,
    run=run,
    warmup_shapes=warmup_shapes,
    rows_multiple=64,
    dtypes=frozenset({"bfloat16"}),
)
