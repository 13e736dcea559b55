# SPDX-License-Identifier: Apache-2.0
"""Which kernel takes which shape of weight."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from vllm_fp8ext.kernels.gemm import decode_gemm_configs, selection
from vllm_fp8ext.kernels.gemm.selection import GemmRoute, crossover, crossover_alone, route
from vllm_fp8ext.layers.gemm_kernels import LARGE_M

ALL = ("deep_gemm", "cutlass", "triton")
BIG, WIDE = (4096, 12288), (24576, 4096)
AHEAD = {BIG: 32, WIDE: 64}
"""Up to how many tokens `decode_gemm` is ahead, in these tests."""
ODD = (200, 1000)
"""No multiple of 128, and its rows begin at no multiple of 16 bytes."""


KERNELS = ("decode_gemm", "deep_gemm", "cutlass")
Times = dict[str, list[float]]
"""Microseconds of these, or of the first of them, by tokens."""


@pytest.fixture
def table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[dict[tuple[int, int], Times]], None]]:
    """Puts measured times in place of those that this project has, and what layers were the fastest with."""

    def put(result: dict[tuple[int, int], Times], layers: Sequence[dict[str, Any]] = ()) -> None:
        file = tmp_path / "crossover.json"
        cases = [
            {"n": n, "k": k, "us": {m: dict(zip(KERNELS, us, strict=False)) for m, us in times.items()}}
            for (n, k), times in result.items()
        ]
        file.write_text(json.dumps({"cases": cases}))
        monkeypatch.setattr(selection, "TABLE", file)
        in_layers = tmp_path / "decode_gemm_configs_in_layers.json"
        in_layers.write_text(json.dumps({"cases": layers}))
        monkeypatch.setattr(decode_gemm_configs, "_LAYERS", in_layers)
        _forget()

    yield put
    _forget()


def _forget() -> None:
    selection._alone.cache_clear()
    decode_gemm_configs._in_layers.cache_clear()
    decode_gemm_configs.most_in_layers.cache_clear()


@pytest.mark.parametrize(
    ("shape", "usable", "small_m", "chosen", "expected"),
    [
        (BIG, ALL, True, {}, GemmRoute(32, "deep_gemm")),
        (WIDE, ALL, True, {}, GemmRoute(64, "deep_gemm")),
        (BIG, ALL[1:], True, {}, GemmRoute(64, "cutlass")),
        (BIG, ALL, False, {}, GemmRoute(0, "deep_gemm")),
        (BIG, (), True, {}, GemmRoute(128, "decode_gemm")),
        (BIG, (), False, {}, None),
        (ODD, ("triton",), True, {}, GemmRoute(0, "triton")),
        (ODD, (), True, {}, None),
        (BIG, ALL, True, {"decode_tokens": 0}, GemmRoute(0, "deep_gemm")),
        (BIG, ALL, True, {"decode_tokens": 128, "gemm": "triton"}, GemmRoute(128, "triton")),
        (BIG, ALL, True, {"gemm": "decode_gemm"}, GemmRoute(128, "decode_gemm")),
        (ODD, ("triton",), True, {"decode_tokens": 0}, GemmRoute(0, "triton")),
    ],
)
def test_routes(shape, usable, small_m, chosen, expected, table) -> None:
    table(
        {
            known: {str(m): [1, 2] if m <= most else [2, 1] for m in (16, 32, 64, 128)}
            for known, most in AHEAD.items()
        }
    )
    assert route(shape, usable, small_m=small_m, **chosen) == expected


@pytest.mark.parametrize(
    ("shape", "usable", "small_m", "chosen", "match"),
    [
        (BIG, ALL, False, {"decode_tokens": 8}, "decode_tokens 8: decode_gemm does not take .* 4096x12288"),
        (ODD, ALL, True, {"decode_tokens": 8}, "decode_gemm does not take weights of 200x1000"),
        (BIG, ALL[2:], True, {"gemm": "cutlass"}, "gemm cutlass: .*; those that do: triton, decode_gemm"),
        (BIG, (), False, {"gemm": "decode_gemm"}, "those that do: none"),
    ],
)
def test_what_was_chosen_is_not_replaced(shape, usable, small_m, chosen, match) -> None:
    with pytest.raises(ValueError, match=match):
        route(shape, usable, small_m=small_m, **chosen)


@pytest.mark.parametrize(
    ("times", "most"),
    [
        ({"8": [1, 2], "16": [1, 2], "32": [2, 1], "64": [1, 2]}, 16),
        ({"8": [2, 1], "16": [1, 2]}, 0),
        ({"16": [1, 2], "8": [1, 1]}, 16),
    ],
)
def test_the_crossover_is_where_the_decode_gemm_falls_behind(
    times: dict[str, list[float]], most: int, table: Callable[..., None]
) -> None:
    table({(256, 512): times})
    assert crossover(256, 512, "deep_gemm") == most


def in_layers(n: int, k: int, most: int) -> list[dict[str, Any]]:
    """What a layer of these weights was the fastest with: `decode_gemm` up to so many tokens."""
    config = (64, 1, False, False)
    return [
        {"n": n, "k": k, "tokens": tokens, "config": config if tokens <= most else None}
        for tokens in decode_gemm_configs.TOKENS
    ]


def test_what_a_layer_is_the_fastest_with_goes_first(table: Callable[..., None]) -> None:
    alone = {"16": [1, 2, 2], "32": [2, 1, 1]}
    table({BIG: alone, WIDE: alone}, in_layers(*BIG, 64))
    assert route(BIG, ALL, small_m=True) == GemmRoute(64, "deep_gemm")
    assert route(WIDE, ALL, small_m=True) == GemmRoute(16, "deep_gemm"), "measured alone"
    assert route(BIG, ALL[1:], small_m=True) == GemmRoute(16, "cutlass"), (
        "layers are measured beside DeepGEMM"
    )
    assert crossover_alone(*BIG, "deep_gemm") == 16
    assert crossover(4096, 12416, "deep_gemm") == 64, "like the shape nearest in size"


@pytest.mark.parametrize("most", [0, 8, 64, 128])
def test_layers_end_where_the_first_is_faster_with_deep_gemm(most: int, table: Callable[..., None]) -> None:
    table({}, in_layers(*BIG, most))
    assert crossover(*BIG, "deep_gemm") == most
    later = [
        case | {"config": (64, 1, False, False)} if case["tokens"] == 128 else case
        for case in in_layers(*BIG, most)
    ]
    table({}, later)
    assert crossover(*BIG, "deep_gemm") == (128 if most >= 64 else most)


@pytest.mark.parametrize("measured", [{8}, {8, 16}, {16, 32, 64, 128}, {8, 16, 64, 128}])
def test_layers_that_were_not_measured_as_far_say_nothing(
    measured: set[int], table: Callable[..., None]
) -> None:
    """Where the sweep ended early, or was asked for some numbers of tokens."""
    known = [case for case in in_layers(*BIG, 64) if case["tokens"] in measured]
    table({BIG: {"16": [1, 2], "32": [2, 1]}}, known)
    assert crossover(*BIG, "deep_gemm") == 16


def test_layers_that_were_measured_until_deep_gemm_was_faster_say_enough(table: Callable[..., None]) -> None:
    known = [case for case in in_layers(*BIG, 32) if case["tokens"] <= 64]
    table({BIG: {"16": [1, 2], "32": [2, 1]}}, known)
    assert crossover(*BIG, "deep_gemm") == 32


def test_a_shape_that_was_not_measured_is_like_the_one_nearest_in_size(table: Callable[..., None]) -> None:
    ahead = {most: {str(m): [1, 2] if m <= most else [2, 1] for m in (16, 32, 64)} for most in (16, 32, 64)}
    table({(1024, 1024): ahead[16], (4096, 4096): ahead[32], (512, 32768): ahead[64]})
    assert crossover(1024, 2048, "deep_gemm") == 16
    assert crossover(8192, 2048, "deep_gemm") == 32, "as large as two of them, and more like the first"
    assert crossover(64, 1 << 18, "deep_gemm") == 64


def test_one_time_that_is_off_moves_nothing(table: Callable[..., None]) -> None:
    table({(256, 512): {"8": [1.01, 1], "16": [1, 2], "32": [1, 1.5], "64": [2, 1]}})
    assert crossover(256, 512, "deep_gemm") == 32


def test_each_kernel_for_many_tokens_has_its_own(table: Callable[..., None]) -> None:
    table({BIG: {"16": [1, 2], "32": [2, 1]}, WIDE: {"16": [1, 2, 2], "32": [2, 1, 3], "64": [2, 1, 1]}})
    assert route(WIDE, ALL, small_m=True) == GemmRoute(16, "deep_gemm")
    assert route(WIDE, ALL[1:], small_m=True) == GemmRoute(32, "cutlass")
    assert route(BIG, ALL[1:], small_m=True) == GemmRoute(32, "cutlass"), "measured for the other shape alone"
    assert route(BIG, ALL[2:], small_m=True) == GemmRoute(64, "triton"), "not measured"
    assert route(WIDE, ALL, small_m=True, gemm="cutlass") == GemmRoute(32, "cutlass"), "as the user wants it"
    assert route(BIG, (), small_m=True) == GemmRoute(128, "decode_gemm"), "which takes the others too"


@pytest.mark.parametrize("most", [0, 128])
def test_a_crossover_at_either_end(most: int, table: Callable[..., None]) -> None:
    table({(4096, 12288): {str(m): [1, 2] if most else [2, 1] for m in decode_gemm_configs.TOKENS}})
    assert route((4096, 12288), ("deep_gemm",), small_m=True) == GemmRoute(most, "deep_gemm")
    forced = route((4096, 12288), ("deep_gemm",), small_m=True, gemm="decode_gemm")
    assert forced == GemmRoute(128, "decode_gemm")


def test_columns_that_the_widest_kernels_have_no_room_for(table: Callable[..., None]) -> None:
    n, k = 4096, 1 << 16
    widest = max(m for m in decode_gemm_configs.TOKENS if decode_gemm_configs.usable(m, n, k))
    assert widest < 128
    table({(n, k): {str(m): [1, 2] for m in decode_gemm_configs.TOKENS}})
    assert route((n, k), ("deep_gemm",), small_m=True) == GemmRoute(widest, "deep_gemm")


def test_every_measured_shape_says_of_which_run_it_is() -> None:
    measured = json.loads(selection.TABLE.read_text())
    for case in measured["cases"]:
        assert measured["runs"][case["run"]]["gpus"]
        assert set(case["us"]) <= {str(tokens) for tokens in decode_gemm_configs.TOKENS}
        for times in case["us"].values():
            assert {"decode_gemm", "deep_gemm"} <= set(times) <= set(KERNELS)
            assert all(us > 0 for us in times.values())


SELECTED = json.loads(Path(__file__).with_name("selection_table.json").read_text())
"""By shape, from which number of tokens on which kernel runs; of `decode_gemm` the tile config too."""


@pytest.mark.parametrize("shape", SELECTED)
def test_what_runs_for_each_number_of_tokens(shape: str) -> None:
    """Measured shapes, others like them, rows that few kernels take and columns that the widest have no room for."""
    n, k = map(int, shape.split("x"))
    taking = [kernel.name for kernel in LARGE_M if kernel.takes(n, k, "bfloat16")]
    chosen = route((n, k), taking, small_m=True)
    assert chosen is not None
    runs = []
    for m in range(1, 257):
        run: list[object] = [chosen.gemm]
        if m <= chosen.decode_tokens:
            config = decode_gemm_configs.choose(n, k, decode_gemm_configs.width(m), quantized=True)
            run = ["decode_gemm", config.rows, config.splits, config.stages, config.stream, config.early]
        if not runs or runs[-1][1:] != run:
            runs.append([m, *run])
    assert runs == SELECTED[shape]
