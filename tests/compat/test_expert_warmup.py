# SPDX-License-Identifier: Apache-2.0
"""At which numbers of tokens experts are warmed up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="needs Triton, which the CPU build does not bring")
from vllm_fp8ext.compat.expert_warmup import token_counts
from vllm_fp8ext.kernels.expert_cuts import expert_route
from vllm_fp8ext.kernels.expert_rows import CHUNK, SMALL

TUNED = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024]


@given(st.integers(1, 512), st.integers(1, 16), st.integers(1, 8192))
def test_every_kernel_that_tokens_can_need_is_run(experts: int, chosen: int, tokens: int) -> None:
    """Where the choice is the same, vLLM's nearest tuned size is too, and as many launches order the slots."""

    def variant(count: int) -> object:
        route = expert_route(experts, chosen, ("triton", "deep_gemm", "fused"))
        nearest = min(TUNED, key=lambda size: abs(size - count))
        slots = count * chosen
        return route.choose(count), nearest, slots <= SMALL, slots <= CHUNK

    route = expert_route(experts, chosen, ("triton", "deep_gemm", "fused"))
    assert variant(tokens) in [variant(count) for count in token_counts(route, TUNED, 8192)]
