# SPDX-License-Identifier: Apache-2.0
"""How the decode GEMM is cut into blocks, and which cut is the fastest.

`decode_gemm_configs.json` has what was measured of GEMMs alone, `decode_gemm_configs_in_layers.json` of those in a model's
layer.
"""

import dataclasses
import functools
import itertools
import json
import math
from pathlib import Path
from typing import Any, TypeAlias

from vllm_fp8ext.kernels.numerics.layout import BLOCK, blocks
from vllm_fp8ext.kernels.runtime.cuda_kernel import MOST_SHARED_BYTES

TOKENS = (8, 16, 32, 64, 128)
"""Widths that kernels are built for; a batch takes the smallest that holds it."""
SPLITS = (1, 2, 4, 8, 16)
_WIDEST = {192: 64, 256: 64}
"""Widest TOKENS for a tile of so many rows, where accumulators of more don't fit in its threads' registers."""
_FEWEST_STAGES = 3
_HALF = 113 * 1024
"""Shared memory with which two blocks fit on a multiprocessor."""
_TABLE = Path(__file__).with_suffix(".json")
_LAYERS = Path(__file__).with_name("decode_gemm_configs_in_layers.json")
_ALIKE = 4
_BARRIER_BYTES = 8
_UNKNOWN = 1.5
"""Time, relative to the fastest cut's, of one that is not among the fastest that the table keeps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How one GEMM is cut: see the top of `decode_gemm.cu`."""

    rows: int
    """Weight rows of a tile: 64, 128, 192 or 256."""
    splits: int
    """Parts of K, each taken by one block of a cluster: 1, 2, 4, 8 or 16."""
    stages: int = 0
    """Depth of the shared-memory ring, in blocks of 128 columns; 0: as deep as fits and is of use."""
    stream: bool = False
    """Activations that come quantized go through the ring, again for each tile, and leave shared memory for a second block on
    the multiprocessor: for weights of few tiles."""
    early: bool = False
    """Start while the previous kernel of the stream still runs (programmatic dependent launch). Only where that kernel
    does not write this one's weights."""

    def ring(self, tokens: int, k: int, shared_bytes: int = MOST_SHARED_BYTES) -> int:
        """Stages that a kernel of so many TOKENS gets in so much shared memory."""
        room = shared_bytes - self._fixed_bytes(tokens, k)
        fitting = room // self._stage_bytes(tokens)
        return max(0, min(self.stages or fitting, fitting))

    def shared_bytes(self, tokens: int, k: int) -> int:
        """Shared memory of a block."""
        return self.ring(tokens, k) * self._stage_bytes(tokens) + self._fixed_bytes(tokens, k)

    def fits(self, tokens: int, k: int) -> bool:
        """Whether the part of x that a block keeps leaves room for a ring, and the accumulators fit in registers."""
        return self.ring(tokens, k) >= _FEWEST_STAGES and tokens <= _WIDEST.get(self.rows, TOKENS[-1])

    def _stage_bytes(self, tokens: int) -> int:
        return self.rows * BLOCK + 2 * _BARRIER_BYTES + (_x_bytes(tokens) if self.stream else 0)

    def _fixed_bytes(self, tokens: int, k: int) -> int:
        depth, warps = 0 if self.stream else -(-blocks(k) // self.splits), self.rows // 16
        owned = -(-warps * (tokens // 8) // self.splits)
        received = self.splits * owned * 512 if self.splits > 1 else 0
        return depth * (_x_bytes(tokens) + _BARRIER_BYTES) + received + warps * 2 * _BARRIER_BYTES


def _x_bytes(tokens: int) -> int:
    """Shared memory of 128 columns of x: codes and scales."""
    return tokens * (BLOCK + 4)


def usable(m: int, n: int, k: int) -> bool:
    """Whether this kernel takes the shape."""
    if not (0 < m <= TOKENS[-1] and n > 0 and k > 0 and k % 16 == 0):
        return False
    return any(Config(rows=64, splits=splits).fits(width(m), k) for splits in SPLITS)


def width(m: int) -> int:
    """TOKENS of the kernel that takes `m` tokens."""
    return next(tokens for tokens in TOKENS if tokens >= m)


def widths(most: int) -> tuple[int, ...]:
    """TOKENS of every kernel that batches of up to `most` tokens take."""
    return tuple(tokens for tokens in TOKENS if tokens <= width(most)) if most else ()


def cuts(n: int, k: int, tokens: int, *, quantized: bool) -> list[Config]:
    """Every cut that fits: with as deep a ring as fits, and with one that leaves room for a second block on the
    multiprocessor, of the next kernel for example."""
    found = []
    for rows, splits in itertools.product((64, 128, 192, 256), SPLITS):
        for stream in (False, True)[: 1 + quantized]:
            cut = Config(rows=rows, splits=splits, stream=stream, early=True)
            if splits > blocks(k) or not cut.fits(tokens, k):
                continue
            depths = dict.fromkeys((cut.ring(tokens, k), cut.ring(tokens, k, _HALF)))
            found += [dataclasses.replace(cut, stages=depth) for depth in depths if depth >= _FEWEST_STAGES]
    return found


@functools.cache
def choose(n: int, k: int, tokens: int, *, quantized: bool, most_splits: int = SPLITS[-1]) -> Config:
    """The cut with which a model's layer was the fastest, where one with weights of this shape was measured. Else the one
    that is the fastest alone. `quantized`: as x comes.

    Raises:
        ValueError: nothing fits with so few splits.
    """
    wanted = _in_layers().get((n, k), {}).get(tokens) if quantized else None
    found = of_kind(n, k, tokens, wanted, quantized=quantized) if wanted else None
    if found and found.splits <= most_splits:
        return found
    return fastest_alone(n, k, tokens, quantized=quantized, most_splits=most_splits)


def fastest_alone(n: int, k: int, tokens: int, *, quantized: bool, most_splits: int = SPLITS[-1]) -> Config:
    """The cut that was the fastest where this shape was measured. Else the one that was the fastest on average of those for
    the four measured shapes that are the most alike: for shapes left out of the table it takes 1.05 times as long as the
    best. Shapes whose fastest cuts all have more than `most_splits` say nothing.

    Raises:
        ValueError: nothing fits with so few splits.
    """
    known = _measured(tokens, quantized, most_splits)
    near = sorted(known, key=lambda shape: abs(math.log(n / shape[0])) + abs(math.log(k / shape[1])))[:_ALIKE]
    tables = [known[shape] for shape in ([(n, k)] if (n, k) in known else near)]

    def slowness(cut: Config) -> float:
        return sum(table.get(kind(cut, tokens, k), _UNKNOWN) for table in tables)

    fitting = [cut for cut in cuts(n, k, tokens, quantized=quantized) if cut.splits <= most_splits]
    if not fitting:
        raise ValueError(
            f"decode_gemm: no cut of {n}x{k} for {tokens} tokens has {most_splits} splits or fewer"
        )
    return min(fitting, key=slowness)


Kind: TypeAlias = tuple[int, int, bool, bool]
"""Rows, splits, stream, and whether it leaves room for a second block."""


def kind(cut: Config, tokens: int, k: int) -> Kind:
    """What tells cuts of other shapes apart."""
    return cut.rows, cut.splits, cut.stream, cut.shared_bytes(tokens, k) <= _HALF


def of_kind(n: int, k: int, tokens: int, wanted: Kind, *, quantized: bool) -> Config | None:
    """The cut of a shape that is of this kind; None if none that fits is."""
    fitting = cuts(n, k, tokens, quantized=quantized)
    return next((cut for cut in fitting if kind(cut, tokens, k) == wanted), None)


@functools.cache
def _table() -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads(_TABLE.read_text())["cases"]
    return cases


@functools.cache
def most_in_layers() -> dict[tuple[int, int], int]:
    """By rows and columns of the weights, up to how many tokens a layer was the fastest with this kernel, and not with
    DeepGEMM; of shapes that were measured until it was not, or with all numbers of tokens that it takes."""
    found = {}
    for (n, k), cuts in _in_layers().items():
        taken = [tokens for tokens in TOKENS if usable(tokens, n, k)]
        ahead = list(itertools.takewhile(cuts.get, taken))
        if len(ahead) == len(taken) or taken[len(ahead)] in cuts:
            found[n, k] = max(ahead, default=0)
    return found


@functools.cache
def _in_layers() -> dict[tuple[int, int], dict[int, Kind | None]]:
    """By rows and columns of the weights, and by number of tokens, as `benchmarks/layer_sweep.py` writes them; None where a
    layer was faster with DeepGEMM."""
    found: dict[tuple[int, int], dict[int, Kind | None]] = {}
    for case in json.loads(_LAYERS.read_text())["cases"]:
        cut: Kind | None = None
        if case["cut"]:
            rows, splits, stream, half = case["cut"]
            cut = rows, splits, stream, half
        found.setdefault((case["n"], case["k"]), {})[case["tokens"]] = cut
    return found


@functools.cache
def _measured(tokens: int, quantized: bool, most_splits: int) -> dict[tuple[int, int], dict[Kind, float]]:
    """By shape of the weights, times of the fastest cuts relative to the fastest, at the measured width next to `tokens`; as
    `benchmarks/kernel_sweep.py` writes them."""
    cases = [case for case in _table() if case["quantized"] == quantized]
    swept = {case["tokens"] for case in cases}
    width = min(swept, key=lambda other: abs(math.log(other / tokens)))
    found = {}
    for case in cases:
        kept = [cut for cut in case["cuts"] if cut[1] <= most_splits]
        if case["tokens"] == width and kept:
            best = min(us for *_, us in kept)
            found[case["n"], case["k"]] = {
                (rows, splits, stream, half): us / best for rows, splits, stream, half, us in kept
            }
    return found
