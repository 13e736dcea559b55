# SPDX-License-Identifier: Apache-2.0
"""Which kernel multiplies by experts, for how many tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_fp8ext.kernels.moe.expert_configs import TILE_CONFIGS, ExpertChoice, expert_route

ALL = ("deep_gemm", "triton", "fused")
COUNTS = st.integers(1, 10_000)


def test_few_tokens_then_more_then_many() -> None:
    route = expert_route(128, 8, ALL)
    ends = [(end, route.choose(end).kernel) for end in (1, 256, 257, 768, 769, 8192)]
    assert ends == [
        *((1, "fused"), (256, "fused")),
        *((257, "triton"), (768, "triton")),
        *((769, "deep_gemm"), (8192, "deep_gemm")),
    ]


@given(st.integers(1, 512), st.integers(1, 16), COUNTS)
def test_the_choice_changes_at_the_boundaries_alone(experts: int, chosen: int, tokens: int) -> None:
    route = expert_route(experts, chosen, ALL)
    ends = [end for end in route.boundaries(20_000) if end >= tokens]
    assert route.choose(tokens) == route.choose(ends[0])


def test_blocks_of_single_slots_only_where_experts_rarely_meet() -> None:
    """With a block for each slot an expert's weights are read once for each of its tokens."""
    assert all(most <= 0.5 for most, config in TILE_CONFIGS if config.alone)
    assert all(not expert_route(8, 2, ALL).choose(tokens).config.alone for tokens in (4, 8))  # type: ignore[union-attr]  # fused has one


@pytest.mark.parametrize("usable", [("triton",), ("triton", "fused"), ALL])
def test_batch_invariant_is_one_kernel(usable: tuple[str, ...]) -> None:
    route = expert_route(128, 8, usable, batch_invariant=True)
    assert {route.choose(tokens) for tokens in (1, 8, 100, 500, 9000)} == {ExpertChoice(route.gemm, None)}
    assert route.gemm == next(name for name in ALL if name in usable)


def test_what_a_user_chose_is_taken() -> None:
    route = expert_route(128, 8, ALL, fused_tokens=0, triton_tokens=70, gemm="triton")
    assert {route.choose(tokens).kernel for tokens in (1, 70, 9000)} == {"triton"}
    route = expert_route(128, 8, ALL, fused_tokens=5000)
    assert route.choose(5000).kernel == "fused"
    assert route.choose(5001).kernel == "deep_gemm"
    assert expert_route(128, 8, ALL, gemm="fused").choose(9000).config == TILE_CONFIGS[-1][1]


@pytest.mark.parametrize("asked", [{"gemm": "deep_gemm"}, {"fused_tokens": 8}])
def test_a_kernel_that_does_not_take_the_experts_is_refused(asked: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"does not take these experts here; those that do: triton"):
        expert_route(128, 8, ["triton"], **asked)  # type: ignore[arg-type]  # values of two types


def test_experts_that_nothing_takes() -> None:
    with pytest.raises(ValueError, match="no FP8 kernel takes"):
        expert_route(128, 8, [])
