# SPDX-License-Identifier: Apache-2.0
"""Registry of GEMM kernels: what settings, selection, warm-up and benchmarks read of each.

Imports neither torch nor vLLM, and so does no module that registers a kernel: the functions of an entry import what they
need when they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_fp8ext.kernels.numerics.layout import BLOCK

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from vllm_fp8ext.kernels.numerics.quantized import Quantized

DECODE_GEMM = "decode_gemm"
"""Name of the kernel for small M, beside which another one takes more tokens."""
COLUMNS_MULTIPLE = BLOCK
"""Multiple that the columns of a weight must have, whatever the kernel for large M."""


def stored_columns(columns: int) -> int:
    """Return how many columns a GPU keeps of a weight's codes.

    Zeros fill the last block where `columns` are a multiple of 16.
    """
    return -(-columns // COLUMNS_MULTIPLE) * COLUMNS_MULTIPLE if columns % 16 == 0 else columns


def always(*_: object) -> bool:
    """Return True."""
    return True


def nothing(*_: object) -> tuple[int, ...]:
    """Return no numbers."""
    return ()


@dataclass(frozen=True, kw_only=True)
class GemmKernel:
    """A kernel that multiplies quantized activations by a weight `[N, K]` with 128x128 block scales."""

    name: str
    """Name in settings (`kernels.shapes.*.gemm`), tables of measurements, logs and benchmarks."""

    run: Callable[[Quantized, Tensor, Tensor, torch.dtype], Tensor]
    """Multiplies: `(x, codes_NK, scales_NbKb, dtype)` → `x @ weight.T` `[M, N]` of that dtype, M at least 1."""

    supports: Callable[[int, int, str], bool] = always
    """Tells whether the kernel runs on this machine: `(n, k, dtype)`, the dtype of activations as torch names it."""

    warmup_shapes: Callable[[Tensor, range], Iterable[int]] = nothing
    """Numbers of tokens at which other machine code runs: `(codes_NK, tokens)` → those of `tokens` that are to be run before
    the server is ready. The largest one is always run."""

    rows_multiple: int = BLOCK
    """Multiple that the rows of a weight must have. Like `dtypes` it decides on every machine which layers are FP8."""

    dtypes: frozenset[str] | None = None
    """Dtypes of activations before they are quantized, as torch names them; None: any."""

    batch_invariant: Callable[[int, int], bool] = always
    """Tells whether the result for a token is the same whatever it is computed beside: `(n, k)`."""

    title: str = ""
    """Name in messages, where it is another one."""

    def takes(self, n: int, k: int, dtype: str) -> bool:
        """Tell whether the kernel takes a weight `[n, k]`, by shape and dtype alone."""
        fits = n % self.rows_multiple == 0 and k % COLUMNS_MULTIPLE == 0
        return fits and (self.dtypes is None or dtype in self.dtypes)


GEMM_KERNELS: dict[str, GemmKernel] = {}
"""Registered kernels by name, the fastest for large M first. `vllm_fp8ext.layers.gemm_kernels` fills it."""


def register(kernel: GemmKernel) -> None:
    """Add a kernel behind those that are registered.

    Raises:
        ValueError: another kernel has this name.
    """
    if GEMM_KERNELS.setdefault(kernel.name, kernel) is not kernel:
        raise ValueError(f"GEMM kernel {kernel.name}: expected a new name, found one that is registered")
