# SPDX-License-Identifier: Apache-2.0
"""Which kernel multiplies by a weight of which shape, for how many tokens."""

from typing import NamedTuple

from vllm_fp8ext.kernels import decode_gemm

DECODE_TOKENS = 64
"""Most tokens that go to `decode_gemm`, whatever the shape: the crossover to DeepGEMM has not been measured by shape yet."""


class Route(NamedTuple):
    """Up to `decode_tokens` tokens go to `decode_gemm`, more to the kernel named `gemm`."""

    decode_tokens: int
    gemm: str


def decode_tokens(n: int, k: int) -> int:
    """Most tokens of one launch of `decode_gemm` for a weight `[N, K]`; 0 where it does not take the shape."""
    return DECODE_TOKENS if decode_gemm.usable(DECODE_TOKENS, n, k) else 0
