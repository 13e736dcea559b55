# SPDX-License-Identifier: Apache-2.0
"""Which kernel multiplies by a weight of which shape, for how many tokens."""

from collections.abc import Sequence
from typing import NamedTuple

from vllm_fp8ext.kernels import decode_gemm

DECODE_TOKENS = 64
"""Most tokens that go to `decode_gemm`, whatever the shape: the crossover to DeepGEMM has not been measured by shape yet."""


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
    if decode_tokens and not (few and decode_gemm.usable(decode_tokens, n, k)):
        raise ValueError(f"decode_tokens {decode_tokens}: decode_gemm does not take weights of {n}x{k} here")
    if not few or not decode_gemm.usable(DECODE_TOKENS, n, k):
        default = 0
    else:
        default = DECODE_TOKENS
        usable = [*usable, "decode_gemm"]
    if gemm is not None and gemm not in usable:
        able = ", ".join(usable) or "none"
        raise ValueError(f"gemm {gemm}: does not take weights of {n}x{k} here; those that do: {able}")
    if not usable:
        return None
    return Route(default if decode_tokens is None else decode_tokens, gemm or usable[0])
