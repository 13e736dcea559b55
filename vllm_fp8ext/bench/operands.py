# SPDX-License-Identifier: Apache-2.0
"""Copies of one projection, more than the L2 cache holds, for timing."""

import functools

from torch import Tensor

from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.testing import kernel_cases, kernel_timing


class Operands:
    """`weights`: BF16; `codes`, `scales`: its FP8."""

    def __init__(self, n: int, k: int) -> None:
        self.n, self.k = n, k
        weight = kernel_cases.weight(n, k, "cuda")
        codes, self.scales = reference.quantize_weight(weight)
        self.codes = [codes.clone() for _ in range(kernel_timing.copies(n * k))]
        self._weight = weight

    @functools.cached_property
    def weights(self) -> list[Tensor]:
        """BF16 weights, which timings of FP8 alone do not need."""
        return [self._weight.clone() for _ in range(kernel_timing.copies(2 * self.n * self.k))]

    def fp8_bytes(self, m: int) -> int:
        """Fewest bytes of one FP8 GEMM."""
        return self.n * self.k + self.scales.numel() * 4 + 2 * m * (self.n + self.k)

    def bf16_bytes(self, m: int) -> int:
        """Fewest bytes of one BF16 GEMM."""
        return 2 * (self.n * self.k + m * (self.n + self.k))

    def error(self, x: Tensor, out: Tensor) -> float:
        """Error of a GEMM with the first copy, as a part of its bound."""
        return kernel_cases.gemm_error(out, *reference.quantize_activation(x), self.codes[0], self.scales)

    def difference(self, x: Tensor, out: Tensor) -> float:
        """Return ‖out - exact‖ / ‖exact‖ of the first copy with unquantized activations."""
        exact = x.double() @ reference.dequantize_weight(self.codes[0], self.scales).double().t()
        return float((out.double() - exact).norm() / exact.norm())
