# SPDX-License-Identifier: Apache-2.0
"""GEMM kernels that a linear layer can take, one file each.

A kernel is a file here and a place in `LARGE_M`: settings, selection, warm-up, `fp8ext bench kernels` and tests read the
registry. `docs/adding-a-kernel.md` says how.
"""

from vllm_fp8ext.kernels.gemm.registry import GEMM_KERNELS, GemmKernel, register
from vllm_fp8ext.layers.expert_kernels import EXPERT_KERNELS
from vllm_fp8ext.layers.gemm_kernels.cutlass import CUTLASS
from vllm_fp8ext.layers.gemm_kernels.decode_gemm import DECODE_GEMM_KERNEL
from vllm_fp8ext.layers.gemm_kernels.deep_gemm import DEEP_GEMM
from vllm_fp8ext.layers.gemm_kernels.triton import TRITON

LARGE_M: tuple[GemmKernel, ...] = (DEEP_GEMM, CUTLASS, TRITON)
"""Kernels for any number of tokens, the fastest first."""

for _kernel in (*LARGE_M, DECODE_GEMM_KERNEL):
    register(_kernel)


def usable(n: int, k: int, dtype: str) -> list[str]:
    """Name the kernels for large M that run here, the fastest first.

    `n`, `k`: of the weight `[n, k]` on this rank. `dtype`: of activations, as torch names it.
    """
    return [kernel.name for kernel in LARGE_M if kernel.takes(n, k, dtype) and kernel.supports(n, k, dtype)]


def rows_multiple(dtype: str) -> int:
    """Return the smallest multiple of rows that a kernel for large M takes.

    `dtype`: of activations, as torch names it.
    """
    return min(kernel.rows_multiple for kernel in LARGE_M if kernel.dtypes is None or dtype in kernel.dtypes)


def names() -> list[str]:
    """Name every kernel of linear layers that settings may choose."""
    return list(GEMM_KERNELS)


def expert_names() -> list[str]:
    """Name every kernel of fused experts that settings may choose."""
    return list(EXPERT_KERNELS)
