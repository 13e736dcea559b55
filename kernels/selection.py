# SPDX-License-Identifier: Apache-2.0
"""Which kernel multiplies by a weight of which shape, for how many tokens."""

from collections.abc import Sequence
from typing import NamedTuple

from vllm_fp8ext.kernels import decode_cuts

LARGE = 64 << 20
"""Elements of a weight from which on `decode_gemm` is ahead of DeepGEMM up to 64 tokens, and up to 32 below. Measured on one
H200 with activations that come quantized (`fp8ext bench kernels`): 24576x4096 takes 25.4 us against 28.0 with 64 tokens, and
43.4 against 29.9 with 128; 4096x12288, 6144x4096 and 4096x4096 take 14.6, 8.3 and 6.9 against 17.7, 9.7 and 7.9 with 32, and
17.5, 9.7 and 8.5 against 16.3, 9.0 and 7.2 with 64."""


MOST, MOST_SMALL = 64, 32
"""Most tokens of `decode_gemm` for large weights, and for smaller ones."""


def crossover(n: int, k: int) -> int:
    """Most tokens that go to `decode_gemm` where DeepGEMM takes the others."""
    return MOST if n * k >= LARGE else MOST_SMALL


class Route(NamedTuple):
    """Up to `decode_tokens` tokens go to `decode_gemm`, more to the kernel named `gemm`."""

    decode_tokens: int
    gemm: str


def route(
    shape_NK: tuple[int, int],
    usable: Sequence[str],
    *,
    few: bool,
    decode_tokens: int | None = None,
    gemm: str | None = None,
) -> Route | None:
    """The kernels for one shape of weight; None if there are none.

    `usable`: kernels for many tokens that take it here, the fastest first. `few`: whether `decode_gemm` runs here. Of what a
    user chose, `decode_tokens` or `gemm`, nothing is left out.

    Raises:
        ValueError: a kernel that the user chose does not take the shape here.
    """
    n, k = shape_NK
    if decode_tokens and not (few and decode_cuts.usable(decode_tokens, n, k)):
        raise ValueError(f"decode_tokens {decode_tokens}: decode_gemm does not take weights of {n}x{k} here")
    most = crossover(n, k) if "deep_gemm" in usable else MOST
    if not few or not decode_cuts.usable(most, n, k):
        default = 0
    else:
        default = most
        usable = [*usable, "decode_gemm"]
    if gemm is not None and gemm not in usable:
        able = ", ".join(usable) or "none"
        raise ValueError(f"gemm {gemm}: does not take weights of {n}x{k} here; those that do: {able}")
    if not usable:
        return None
    return Route(default if decode_tokens is None else decode_tokens, gemm or usable[0])
