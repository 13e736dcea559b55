# SPDX-License-Identifier: Apache-2.0
"""At which numbers of tokens experts are warmed up, and at which sizes DeepGEMM is."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="needs Triton, which the CPU build does not bring")
from vllm_fp8ext.compat.warmup import expert_warmup
from vllm_fp8ext.compat.warmup.expert_warmup import expert_sizes, token_counts
from vllm_fp8ext.kernels.moe.expert_configs import ExpertRoute, expert_route
from vllm_fp8ext.kernels.moe.expert_rows import CHUNK, SMALL, expert_rows_reference
from vllm_fp8ext.kernels.quantize.quantize_activation import large_m

TUNED = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024]


@given(st.integers(1, 512), st.integers(1, 16), st.integers(1, 8192))
def test_every_kernel_that_tokens_can_need_is_run(experts: int, chosen: int, tokens: int) -> None:
    """Where the choice is the same, vLLM's nearest tuned size is too, and as many launches order the slots."""

    def variant(count: int) -> object:
        route = expert_route(experts, chosen, ("deep_gemm", "triton", "fused"))
        nearest = min(TUNED, key=lambda size: abs(size - count))
        slots = count * chosen
        return route.choose(count), nearest, slots <= SMALL, slots <= CHUNK

    route = expert_route(experts, chosen, ("deep_gemm", "triton", "fused"))
    assert variant(tokens) in [variant(count) for count in token_counts(route, TUNED, 8192)]


@given(st.integers(1, 512), st.integers(1, 16), st.sampled_from((128, 2048, 7168)), st.integers(1, 8192))
def test_quantizers_are_run_for_one_token_to_a_program_and_for_several(
    experts: int, chosen: int, columns: int, tokens: int
) -> None:
    """Of each token, and of each slot, by each kernel between."""
    route = expert_route(experts, chosen, ("deep_gemm", "triton", "fused"))

    def variant(count: int, rows: int) -> object:
        return route.choose(count).kernel, rows >= large_m(columns)

    counts = token_counts(route, TUNED, 8192)
    for each in (1, chosen):
        assert variant(tokens, tokens * each) in [variant(count, count * each) for count in counts]


def layer(route: ExpertRoute, local: int) -> Any:
    weights = {"w13_weight": torch.empty(local, 256, 384), "w2_weight": torch.empty(local, 384, 128)}
    return SimpleNamespace(**weights), None, route


@pytest.mark.parametrize(("experts", "chosen", "ranks"), [(16, 4, 1), (128, 8, 1), (128, 8, 2), (8, 2, 1)])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_deep_gemm_is_compiled_for_every_number_of_rows_that_it_can_get(
    monkeypatch: pytest.MonkeyPatch, experts: int, chosen: int, ranks: int, batch_invariant: bool
) -> None:
    """What `deep_gemm` gives it for each number of tokens, seen where it would multiply."""
    monkeypatch.setattr(expert_warmup, "alignment", lambda: 128)
    route = expert_route(experts, chosen, ("deep_gemm", "triton", "fused"), batch_invariant=batch_invariant)
    local, most = experts // ranks, 900
    sizes = expert_sizes([layer(route, local)], most)
    assert set(sizes) == {(256, 384, local), (384, 128, local)}
    for tokens in {*range(1, 40), *range(40, most, 7), most - 1, most}:
        if route.choose(tokens).kernel == "deep_gemm":
            of = torch.arange(tokens * chosen, dtype=torch.int32).view(tokens, chosen) % experts
            of = torch.where(of < local, of, -1)
            rows = expert_rows_reference(of, local, 128).slots.shape[0]
            assert all(rows in counts for counts in sizes.values()), tokens


def test_who_skips_the_warm_up_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_DEEP_GEMM_WARMUP", "skip")
    assert expert_sizes([layer(expert_route(16, 4, ("deep_gemm",)), 16)], 64) == {}
