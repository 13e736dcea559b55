# SPDX-License-Identifier: Apache-2.0
"""Times that are made up choose the kernel and tile config of a GEMM in a layer."""

from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vllm_fp8ext.kernels.gemm import decode_gemm_configs
from vllm_fp8ext.kernels.gemm.decode_gemm_configs import TileConfig
from vllm_fp8ext.kernels.testing import kernel_timing
from vllm_fp8ext.kernels.testing.kernel_timing import Timing

UP, DOWN, TOKENS = (24576, 4096), (4096, 12288), 16
"""Shapes of weights that were measured alone."""


def fast(shape: tuple[int, int]) -> TileConfig:
    """One that is not the fastest alone."""
    n, k = shape
    alone = decode_gemm_configs.fastest_alone(n, k, TOKENS, quantized=True)
    known = decode_gemm_configs._measured(TOKENS, True, 16)[shape]
    every = decode_gemm_configs.tile_configs(n, k, TOKENS, quantized=True)
    return next(
        config
        for config in every
        if config != alone and decode_gemm_configs.config_key(config, TOKENS, k) in known
    )


@pytest.fixture
def tried(layer_sweep: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`_tried` of a layer of two GEMMs, with microseconds by their tile configs; NaN is an error."""

    def run(us: Callable[[Any], float], settled: Any = None, known: Any = None) -> Any:
        def measure(calls: dict[str, partial[None]], *_: Any) -> dict[str, Timing]:
            times = {name: us(call.args[1]) for name, call in calls.items()}
            return {
                name: Timing(samples=(time,)) if time == time else Timing(error="refused")
                for name, time in times.items()
            }

        monkeypatch.setattr(kernel_timing, "measure", measure)
        layers = SimpleNamespace(shapes=(UP, DOWN), count=2, run=lambda *_: None, batch=lambda _: None)
        return layer_sweep._tried(layers, TOKENS, settled or {}, known or {})

    return run


def test_each_gemm_gets_the_config_with_which_the_layer_is_the_fastest(tried: Callable[..., Any]) -> None:
    best = {UP: fast(UP), DOWN: fast(DOWN)}
    chosen, times = tried(lambda configs: 10.0 - sum(configs[shape] == best[shape] for shape in best))
    assert chosen == best
    assert times == [10.0, 8.0]


def test_a_shape_that_is_settled_stays(tried: Callable[..., Any]) -> None:
    up = decode_gemm_configs.fastest_alone(*UP, TOKENS, quantized=True)
    chosen, times = tried(
        lambda configs: 10.0 - (configs[UP] != up) - (configs[DOWN] == fast(DOWN)), {UP: up}
    )
    assert chosen == {DOWN: fast(DOWN)}
    assert times == [10.0, 9.0]


def test_what_brings_next_to_nothing_is_left(tried: Callable[..., Any]) -> None:
    chosen, times = tried(lambda configs: 10.0 - 0.01 * (configs[UP] == fast(UP)))
    assert chosen == {
        shape: decode_gemm_configs.fastest_alone(*shape, TOKENS, quantized=True) for shape in (UP, DOWN)
    }
    assert times == [10.0, 10.0]


def test_deep_gemm_is_taken_where_the_layer_is_the_fastest_with_it(tried: Callable[..., Any]) -> None:
    chosen, times = tried(lambda configs: 10.0 - (configs[DOWN] is None) + (configs[UP] is None))
    assert chosen[DOWN] is None
    assert chosen[UP] is not None
    assert times == [10.0, 9.0]


@pytest.mark.parametrize("most", [TOKENS - 1, TOKENS])
def test_what_is_the_fastest_alone_is_what_others_are_compared_with(
    most: int, tried: Callable[..., Any], layer_sweep: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_sweep.selection, "crossover_alone", lambda *_: most)
    alone = decode_gemm_configs.fastest_alone(*UP, TOKENS, quantized=True) if most == TOKENS else None
    chosen, times = tried(lambda configs: 10.0 - (configs[UP] != alone))
    assert chosen[UP] != alone
    assert times == [10.0, 9.0]


def test_a_config_that_fails_is_not_taken(tried: Callable[..., Any]) -> None:
    chosen, _ = tried(
        lambda configs: float("nan") if configs[UP] == fast(UP) else 10.0 - (configs[DOWN] == fast(DOWN))
    )
    assert chosen[UP] != fast(UP)
    assert chosen[DOWN] == fast(DOWN)


def test_a_layer_that_never_runs_ends_the_sweep(tried: Callable[..., Any]) -> None:
    with pytest.raises(SystemExit, match="nothing runs: refused"):
        tried(lambda _: float("nan"))


def test_what_the_table_has_of_the_layer_is_begun_with(tried: Callable[..., Any]) -> None:
    known = {UP: fast(UP), DOWN: fast(DOWN)}  # of use together alone
    chosen, times = tried(lambda configs: 10.0 - 2 * (configs == known), known=known)
    assert chosen == known
    assert times == [10.0, 8.0]
    _, times = tried(lambda configs: 10.0 - 2 * (configs == known))
    assert times == [10.0, 10.0]


def test_what_the_table_has_of_a_settled_shape_is_of_no_account(tried: Callable[..., Any]) -> None:
    up = decode_gemm_configs.fastest_alone(*UP, TOKENS, quantized=True)
    chosen, times = tried(lambda configs: 10.0 - (configs[UP] != up), {UP: up}, {UP: fast(UP)})
    assert times == [10.0, 10.0]
    assert chosen.keys() == {DOWN}


def test_configs_that_a_table_has(layer_sweep: ModuleType) -> None:
    config = fast(UP)
    case = {"n": UP[0], "k": UP[1], "tokens": TOKENS, "model": "Qwen3-8B", "tp": 1}
    case["config"] = list(decode_gemm_configs.config_key(config, TOKENS, UP[1]))
    assert layer_sweep._tile_configs([case]) == {TOKENS: {UP: config}}
    assert layer_sweep._tile_configs([case | {"config": None}]) == {TOKENS: {UP: None}}, "DeepGEMM"
    other = case | {"config": (64, 16, False, 5)}
    assert layer_sweep._tile_configs([other]) == {}, "a tile config that there is no more"
