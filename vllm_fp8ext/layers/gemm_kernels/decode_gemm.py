# SPDX-License-Identifier: Apache-2.0
"""This project's kernel for small M; 128 tokens at a time it also takes more."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from vllm_fp8ext.kernels.gemm.registry import DECODE_GEMM, GemmKernel

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from vllm_fp8ext.kernels.numerics.quantized import Quantized

FEATURE: str = "core"

HOPPER = 90
"""Compute capability, times ten, of the GPUs that it is written for."""


def run(x: Quantized, codes_NK: Tensor, scales_NbKb: Tensor, _dtype: torch.dtype) -> Tensor:
    """Multiply as many times as the tokens need it: for shapes that no other kernel takes. The result is BF16."""
    import torch

    from vllm_fp8ext.kernels.gemm import decode_gemm_configs
    from vllm_fp8ext.kernels.gemm.decode_gemm import decode_gemm
    from vllm_fp8ext.kernels.numerics.quantized import Quantized

    m, (n, k) = x.codes.shape[0], codes_NK.shape
    step = max(tokens for tokens in decode_gemm_configs.TOKENS if decode_gemm_configs.usable(tokens, n, k))
    slices = [
        Quantized(x.codes[start : start + step], x.scales[start : start + step])
        for start in range(0, m, step)
    ]
    return torch.cat([decode_gemm(part, codes_NK, scales_NbKb, None, "fp32") for part in slices])


def supports(n: int, k: int, dtype: str) -> bool:
    """Tell whether the shape fits, on a Hopper GPU, where it multiplies once."""
    from vllm.platforms import current_platform

    from vllm_fp8ext.kernels.gemm import decode_gemm_configs

    fits = dtype == "bfloat16" and decode_gemm_configs.usable(1, n, k)
    return fits and current_platform.is_device_capability(HOPPER) and decode_gemm_runs()


@cache
def decode_gemm_runs() -> bool:
    """Tell whether it was compiled here and has multiplied once; a warning says why not."""
    import torch

    from vllm_fp8ext.kernels.gemm import decode_gemm
    from vllm_fp8ext.layers.trials import SHAPE, operands, runs

    def multiply() -> None:
        decode_gemm.decode_gemm(*operands(1, *SHAPE), None, "fp32")
        torch.cuda.synchronize()

    return runs("decode_gemm", multiply)


def batch_invariant(_n: int, _k: int) -> bool:
    """Return False: blocks of K are split by the number of tokens."""
    return False


DECODE_GEMM_KERNEL = GemmKernel(
    name=DECODE_GEMM,
    supports=supports,
    run=run,
    dtypes=frozenset({"bfloat16"}),
    rows_multiple=1,
    batch_invariant=batch_invariant,
)
