# SPDX-License-Identifier: Apache-2.0
"""Which kernel multiplies by a weight of which shape, for how many tokens."""

import functools
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from vllm_fp8ext.kernels.gemm import decode_gemm_configs
from vllm_fp8ext.kernels.numerics.layout import BLOCK

TABLE = Path(__file__).with_name("crossover.json")
"""By shape and number of tokens, microseconds of `decode_gemm` and of the kernels that may take the others, with activations
that a launch before quantizes, on one H200. `benchmarks/crossover.py` writes it; it names the run of each shape.
`decode_gemm_configs` has what was measured in layers, beside DeepGEMM."""
MULTIPLES = {"deep_gemm": 64, "cutlass": BLOCK, "triton": BLOCK}
"""Multiples that the rows of a weight must have, by kernel for many tokens, fastest first."""
COLUMNS = BLOCK
"""Multiple that its columns must have, whatever the kernel."""
MOST = 64
"""Most tokens of `decode_gemm` beside a kernel that was not measured."""


def rows_multiple(dtype: str) -> int:
    """Return of what a weight's rows must be a multiple, for activations of this dtype (torch's name) to be multiplied by it
    many at a time. DeepGEMM, which takes the most, makes BF16."""
    return min(rows for name, rows in MULTIPLES.items() if dtype == "bfloat16" or name != "deep_gemm")


def crossover(n: int, k: int, gemm: str) -> int:
    """Most tokens that go to `decode_gemm` where `gemm` takes the others, as measured for this shape, or else for the one
    that is nearest in size: in a model's layer, or alone where that was not measured."""
    known = _alone(gemm)
    if gemm == "deep_gemm":
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
    found = {}
    for case in json.loads(TABLE.read_text())["cases"]:
        times = sorted((int(tokens), us) for tokens, us in case["us"].items() if gemm in us)
        if not times:
            continue
        # of every cut between the two, how much slower than `gemm` alone; noise in one of the times moves it little
        lost = [0.0, *itertools.accumulate(math.log(us["decode_gemm"] / us[gemm]) for _, us in times)]
        found[case["n"], case["k"]] = [0, *(tokens for tokens, _ in times)][lost.index(min(lost))]
    return found


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
    """The kernels for one shape of weight; None if there are none.

    `usable`: kernels for many tokens that take it here, the fastest first. `few`: whether `decode_gemm` runs here. Of what a
    user chose, `decode_tokens` or `gemm`, nothing is left out.

    Raises:
        ValueError: a kernel that the user chose does not take the shape here.
    """
    n, k = shape_NK
    if decode_tokens and not (small_m and decode_gemm_configs.usable(decode_tokens, n, k)):
        raise ValueError(f"decode_tokens {decode_tokens}: decode_gemm does not take weights of {n}x{k} here")
    taken = [
        tokens
        for tokens in decode_gemm_configs.TOKENS
        if small_m and decode_gemm_configs.usable(tokens, n, k)
    ]
    if taken:
        usable = [*usable, "decode_gemm"]
    if gemm is not None and gemm not in usable:
        able = ", ".join(usable) or "none"
        raise ValueError(f"gemm {gemm}: does not take weights of {n}x{k} here; those that do: {able}")
    if not usable:
        return None
    chosen = gemm or usable[0]
    if decode_tokens is None:
        most = decode_gemm_configs.TOKENS[-1] if chosen == "decode_gemm" else crossover(n, k, chosen)
        decode_tokens = max((tokens for tokens in taken if tokens <= most), default=0)
    return GemmRoute(decode_tokens, chosen)
