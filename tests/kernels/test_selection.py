# SPDX-License-Identifier: Apache-2.0
"""Which kernel takes which shape of weight."""

import pytest

from vllm_fp8ext.kernels.selection import Route, crossover, route

ALL = ("deep_gemm", "cutlass", "triton")
BIG = (4096, 12288)
ODD = (200, 1000)
"""No multiple of 128, and its rows begin at no multiple of 16 bytes."""


@pytest.mark.parametrize(
    ("shape", "usable", "few", "chosen", "expected"),
    [
        (BIG, ALL, True, {}, Route(32, "deep_gemm")),
        ((24576, 4096), ALL, True, {}, Route(64, "deep_gemm")),
        (BIG, ALL[1:], True, {}, Route(64, "cutlass")),
        (BIG, ALL, False, {}, Route(0, "deep_gemm")),
        (BIG, (), True, {}, Route(64, "decode_gemm")),
        (BIG, (), False, {}, None),
        (ODD, ("triton",), True, {}, Route(0, "triton")),
        (ODD, (), True, {}, None),
        (BIG, ALL, True, {"decode_tokens": 0}, Route(0, "deep_gemm")),
        (BIG, ALL, True, {"decode_tokens": 128, "gemm": "triton"}, Route(128, "triton")),
        (BIG, ALL, True, {"gemm": "decode_gemm"}, Route(32, "decode_gemm")),
        (ODD, ("triton",), True, {"decode_tokens": 0}, Route(0, "triton")),
    ],
)
def test_routes(shape, usable, few, chosen, expected) -> None:
    assert route(shape, usable, few=few, **chosen) == expected


@pytest.mark.parametrize(
    ("shape", "usable", "few", "chosen", "match"),
    [
        (BIG, ALL, False, {"decode_tokens": 8}, "decode_tokens 8: decode_gemm does not take .* 4096x12288"),
        (ODD, ALL, True, {"decode_tokens": 8}, "decode_gemm does not take weights of 200x1000"),
        (BIG, ALL[2:], True, {"gemm": "cutlass"}, "gemm cutlass: .*; those that do: triton, decode_gemm"),
        (BIG, (), False, {"gemm": "decode_gemm"}, "those that do: none"),
    ],
)
def test_what_was_chosen_is_not_replaced(shape, usable, few, chosen, match) -> None:
    with pytest.raises(ValueError, match=match):
        route(shape, usable, few=few, **chosen)


def test_large_weights_stay_with_the_decode_gemm_for_longer() -> None:
    assert crossover(24576, 4096) == 64
    assert crossover(4096, 12288) == crossover(4096, 4096) == 32
