# SPDX-License-Identifier: Apache-2.0
"""The choice of the experts' kernels is that of the results, and the page tells it."""

from pathlib import Path
from types import ModuleType

import pytest

from vllm_fp8ext.kernels.moe.expert_configs import expert_route

TOKENS = [2**power for power in range(14)]


def test_the_page_has_the_numbers_of_the_result(experts_page: ModuleType) -> None:
    page = Path(experts_page.PAGE).read_text()
    assert f"<!-- kernels -->\n{experts_page.table(experts_page.cases())}\n<!-- /kernels -->" in page


@pytest.mark.parametrize("tokens", TOKENS)
def test_what_is_chosen_was_measured_to_be_fast(experts_page: ModuleType, tokens: int) -> None:
    """No other kernel or tile config of ours is faster by more than a twenty-fifth, nor is one that was not right chosen."""
    us = {
        case["variant"]: case["us"]
        for case in experts_page.cases()
        if case["kernel"] == "experts" and case["m"] == tokens and case["exact"]
    }
    route = expert_route(experts_page.EXPERTS, experts_page.CHOSEN, ("deep_gemm", "triton", "fused"))
    ours = {name: value for name, value in us.items() if name.startswith("blockfp8")}
    assert ours[experts_page.variant(route.choose(tokens))] <= 1.04 * min(ours.values())
