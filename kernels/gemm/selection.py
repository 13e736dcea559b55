# SPDX-License-Identifier: Apache-2.0
"""Chooses the kernel for a weight by its shape and the number of tokens."""

import functools
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from vllm_fp8ext.kernels.gemm import decode_gemm_configs
from vllm_fp8ext.kernels.gemm.registry import DECODE_GEMM

TABLE = Path(__file__).with_name("crossover.json")
"""Microseconds by shape, number of tokens and kernel, on one H200.

Activations are quantized by a launch before. `benchmarks/crossover.py` writes it, and names the run of each shape.
`decode_gemm_configs` has what was measured in layers.
"""
MOST = 64
"""Most tokens of `decode_gemm` beside a kernel that was not measured."""


def crossover(n: int, k: int, gemm: str) -> int:
    """Return the most tokens that go to `decode_gemm` where the kernel `gemm` takes the others.

    They are as measured for this shape, or else for the one that is nearest in size: in a model's layer, or alone where that
    was not measured.
    """
    known = _alone(gemm)
    if gemm == decode_gemm_configs.BESIDE:
        known = known | decode_gemm_configs.most_in_layers()
    return _nearest(known, n, k)


def crossover_alone(n: int, k: int, gemm: str) -> int:
    """`crossover` by the times of GEMMs alone, where another launch of the same GEMM follows: in a layer the launch behind
    `decode_gemm` begins beside it."""
    return _nearest(_alone(gemm), n, k)


def _nearest(known: Mapping[tuple[int, int], int], n: int, k: int) -> int:
    if not known:
        return MOST
    if (n, k) in known:
        return known[n, k]
    return known[
        min(known, key=lambda shape: (abs(math.log(n * k / math.prod(shape))), abs(math.log(n / shape[0]))))
    ]


@functools.cache
def _alone(gemm: str) -> dict[tuple[int, int], int]:
    """Read, by shape `(N, K)`, up to how many tokens `decode_gemm` was ahead of `gemm`."""
    most = {}
    for case in json.loads(TABLE.read_text())["cases"]:
        times = sorted((int(tokens), us) for tokens, us in case["us"].items() if gemm in us)
        if not times:
            continue
        # of every crossover, how much slower than `gemm` alone; noise in one of the times moves it little
        lost = [0.0, *itertools.accumulate(math.log(us[DECODE_GEMM] / us[gemm]) for _, us in times)]
        most[case["n"], case["k"]] = [0, *(tokens for tokens, _ in times)][lost.index(min(lost))]
    return most


class GemmRoute(NamedTuple):
    """Up to `decode_tokens` tokens go to `decode_gemm`, more to the kernel named `gemm`."""

    decode_tokens: int
    gemm: str


def route(
    shape_NK: tuple[int, int],
    usable: Sequence[str],
    *,
    small_m: bool,
    decode_tokens: int | None = None,
    gemm: str | None = None,
) -> GemmRoute | None:
    """Choose the kernels for one shape of weight; None if there are none.

    `usable`: kernels for large M that take it here, the fastest first. `small_m`: whether `decode_gemm` runs here. A
    `decode_tokens` or `gemm` that the user chose is kept.

    Raises:
        ValueError: a kernel that the user chose does not take the shape here.
    """
    n, k = shape_NK
    if decode_tokens and not (small_m and decode_gemm_configs.usable(decode_tokens, n, k)):
        raise ValueError(f"decode_tokens {decode_tokens}: decode_gemm does not take weights of {n}x{k} here")
    widths = [
        tokens
        for tokens in decode_gemm_configs.TOKENS
        if small_m and decode_gemm_configs.usable(tokens, n, k)
    ]
    if widths:
        usable = [*usable, DECODE_GEMM]
    if gemm is not None and gemm not in usable:
        able = ", ".join(usable) or "none"
        raise ValueError(f"gemm {gemm}: does not take weights of {n}x{k} here; those that do: {able}")
    if not usable:
        return None
    chosen = gemm or usable[0]
    if decode_tokens is None:
        most = decode_gemm_configs.TOKENS[-1] if chosen == DECODE_GEMM else crossover(n, k, chosen)
        decode_tokens = max((tokens for tokens in widths if tokens <= most), default=0)
    return GemmRoute(decode_tokens, chosen)
