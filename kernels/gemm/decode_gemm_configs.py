# SPDX-License-Identifier: Apache-2.0
"""Tile configs of the decode GEMM, and which of them is the fastest.

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
"""Widest TOKENS by rows of a tile, where accumulators of more don't fit in registers."""
_FEWEST_STAGES = 3
_HALF = 113 * 1024
"""Shared memory with which two blocks fit on a multiprocessor."""
_TABLE = Path(__file__).with_suffix(".json")
_LAYERS = Path(__file__).with_name("decode_gemm_configs_in_layers.json")
BESIDE = "deep_gemm"
"""The kernel beside which layers were measured for `_LAYERS`."""
_ALIKE = 4
_BARRIER_BYTES = 8
_UNKNOWN = 1.5
"""Time, relative to the fastest config's, of a config that the table does not keep."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileConfig:
    """Tile sizes of one GEMM: see the top of `decode_gemm.cu`."""

    rows: int
    """Weight rows of a tile: 64, 128, 192 or 256."""
    splits: int
    """Parts of K, each taken by one block of a cluster: 1, 2, 4, 8 or 16."""
    stages: int = 0
    """Depth of the shared-memory ring, in blocks of 128 columns; 0: as deep as fits and is of use."""
    stream: bool = False
    """Quantized activations go through the ring, again for each tile.

    That leaves shared memory for a second block on the multiprocessor: for weights of few tiles.
    """
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
        """Tell whether a ring fits in shared memory, and accumulators in registers."""
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
    """Tell whether `decode_gemm` takes the shape."""
    if not (0 < m <= TOKENS[-1] and n > 0 and k > 0 and k % 16 == 0):
        return False
    return any(TileConfig(rows=64, splits=splits).fits(width(m), k) for splits in SPLITS)


def width(m: int) -> int:
    """TOKENS of the kernel that takes `m` tokens."""
    return next(tokens for tokens in TOKENS if tokens >= m)


def widths(most: int) -> tuple[int, ...]:
    """TOKENS of every kernel that batches of up to `most` tokens take."""
    return tuple(tokens for tokens in TOKENS if tokens <= width(most)) if most else ()


def tile_configs(n: int, k: int, tokens: int, *, quantized: bool) -> list[TileConfig]:
    """List every config that fits a weight `[n, k]`.

    Each comes with as deep a ring as fits, and with one that leaves room for a second block on the multiprocessor, of the
    next kernel for example. `quantized`: as x comes.
    """
    configs = []
    for rows, splits in itertools.product((64, 128, 192, 256), SPLITS):
        for stream in (False, True)[: 1 + quantized]:
            config = TileConfig(rows=rows, splits=splits, stream=stream, early=True)
            if splits > blocks(k) or not config.fits(tokens, k):
                continue
            depths = dict.fromkeys((config.ring(tokens, k), config.ring(tokens, k, _HALF)))
            configs += [
                dataclasses.replace(config, stages=depth) for depth in depths if depth >= _FEWEST_STAGES
            ]
    return configs


@functools.cache
def choose(n: int, k: int, tokens: int, *, quantized: bool, most_splits: int = SPLITS[-1]) -> TileConfig:
    """Choose the config with which a model's layer was the fastest.

    Where no layer with weights of this shape was measured, it is the one that is the fastest alone. `quantized`: as x comes.

    Raises:
        ValueError: nothing fits with so few splits.
    """
    key = _in_layers().get((n, k), {}).get(tokens) if quantized else None
    config = find_config(n, k, tokens, key, quantized=quantized) if key else None
    if config and config.splits <= most_splits:
        return config
    return fastest_alone(n, k, tokens, quantized=quantized, most_splits=most_splits)


def fastest_alone(
    n: int, k: int, tokens: int, *, quantized: bool, most_splits: int = SPLITS[-1]
) -> TileConfig:
    """Choose the config that was the fastest where this shape was measured.

    Else it is the one that was the fastest on average of those for the four measured shapes that are the most alike: for
    shapes left out of the table it takes 1.05 times as long as the best. Shapes whose fastest configs all have more than
    `most_splits` say nothing.

    Raises:
        ValueError: nothing fits with so few splits.
    """
    known = _measured(tokens, quantized, most_splits)
    near = sorted(known, key=lambda shape: abs(math.log(n / shape[0])) + abs(math.log(k / shape[1])))[:_ALIKE]
    tables = [known[shape] for shape in ([(n, k)] if (n, k) in known else near)]

    def slowness(config: TileConfig) -> float:
        return sum(table.get(config_key(config, tokens, k), _UNKNOWN) for table in tables)

    fitting = [
        config for config in tile_configs(n, k, tokens, quantized=quantized) if config.splits <= most_splits
    ]
    if not fitting:
        raise ValueError(
            f"decode_gemm: no tile config of {n}x{k} for {tokens} tokens has {most_splits} splits or fewer"
        )
    return min(fitting, key=slowness)


ConfigKey: TypeAlias = tuple[int, int, bool, bool]
"""Rows, splits, stream, and whether it leaves room for a second block."""


def config_key(config: TileConfig, tokens: int, k: int) -> ConfigKey:
    """Return what identifies a config in the tables, whatever the shape."""
    return config.rows, config.splits, config.stream, config.shared_bytes(tokens, k) <= _HALF


def find_config(n: int, k: int, tokens: int, key: ConfigKey, *, quantized: bool) -> TileConfig | None:
    """Return the config of a shape that has this key; None if none that fits has."""
    fitting = tile_configs(n, k, tokens, quantized=quantized)
    return next((config for config in fitting if config_key(config, tokens, k) == key), None)


@functools.cache
def _table() -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads(_TABLE.read_text())["cases"]
    return cases


@functools.cache
def most_in_layers() -> dict[tuple[int, int], int]:
    """Return, by shape, the most tokens with which layers prefer this kernel.

    Beyond, it was faster with `BESIDE`. Shapes count that were measured until it was, or with all numbers of tokens that
    this kernel takes.
    """
    most = {}
    for (n, k), keys in _in_layers().items():
        taken = [tokens for tokens in TOKENS if usable(tokens, n, k)]
        ahead = list(itertools.takewhile(keys.get, taken))
        if len(ahead) == len(taken) or taken[len(ahead)] in keys:
            most[n, k] = max(ahead, default=0)
    return most


@functools.cache
def _in_layers() -> dict[tuple[int, int], dict[int, ConfigKey | None]]:
    """Read the fastest configs in layers, by shape `(N, K)` and number of tokens.

    `benchmarks/layer_sweep.py` writes them. None: a layer was faster with `BESIDE`.
    """
    keys: dict[tuple[int, int], dict[int, ConfigKey | None]] = {}
    for case in json.loads(_LAYERS.read_text())["cases"]:
        key: ConfigKey | None = None
        if case["config"]:
            rows, splits, stream, half = case["config"]
            key = rows, splits, stream, half
        keys.setdefault((case["n"], case["k"]), {})[case["tokens"]] = key
    return keys


@functools.cache
def _measured(
    tokens: int, quantized: bool, most_splits: int
) -> dict[tuple[int, int], dict[ConfigKey, float]]:
    """Read the fastest configs by shape `(N, K)`, with times relative to the fastest.

    They are those of the measured width next to `tokens`; `benchmarks/kernel_sweep.py` writes them.
    """
    cases = [case for case in _table() if case["quantized"] == quantized]
    swept = {case["tokens"] for case in cases}
    nearest = min(swept, key=lambda other: abs(math.log(other / tokens)))
    times = {}
    for case in cases:
        kept = [config for config in case["configs"] if config[1] <= most_splits]
        if case["tokens"] == nearest and kept:
            best = min(us for *_, us in kept)
            times[case["n"], case["k"]] = {
                (rows, splits, stream, half): us / best for rows, splits, stream, half, us in kept
            }
    return times
