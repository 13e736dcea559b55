# SPDX-License-Identifier: Apache-2.0
"""Experts of a rank that has some of them."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import envs

from vllm_fp8ext.config import Settings
from vllm_fp8ext.layers import experts as module
from vllm_fp8ext.layers.experts import CODES, SCALES, SKIP_PADDING, BlockFp8ExpertsMethod


def test_what_pads_a_batch_goes_to_no_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM chooses -1 for it, which is no place in the map of experts."""
    seen: list[list[list[int]]] = []

    def noted(x: torch.Tensor, *given: Any) -> torch.Tensor:
        seen.append(given[5].tolist())
        return x

    monkeypatch.setattr(module, "reference_experts", noted)
    method: Any = BlockFp8ExpertsMethod.__new__(BlockFp8ExpertsMethod)
    method.route, method.scale_format = None, "fp32"
    held = dict.fromkeys((*CODES, *SCALES))
    chosen = torch.tensor([[0, 5], [-1, -1], [7, 4]], dtype=torch.int32)
    for expert_map in (None, torch.tensor([-1, -1, -1, -1, 0, 1, 2, 3], dtype=torch.int32)):
        layer: Any = SimpleNamespace(expert_map=expert_map, activation=SimpleNamespace(value="silu"), **held)
        method.apply(layer, torch.ones(3, 4), torch.ones(3, 2), chosen, None, None)
    assert seen == [[[0, 5], [-1, -1], [7, 4]], [[-1, 1], [-1, -1], [3, 0]]]


@pytest.mark.parametrize(
    ("ranks", "sequence_parallel", "value"), [(1, False, "1"), (2, False, "0"), (1, True, "0")]
)
def test_padding_is_routed_where_experts_get_tokens_of_other_ranks(
    monkeypatch: pytest.MonkeyPatch, ranks: int, sequence_parallel: bool, value: str
) -> None:
    """vLLM's mask of padding is of one rank's tokens, and its kernel refuses one of another size than what is routed."""
    monkeypatch.setitem(envs.environment_variables, SKIP_PADDING, lambda: True)
    monkeypatch.setenv(SKIP_PADDING, "1")
    moe: Any = SimpleNamespace(
        activation=SimpleNamespace(value="silu"),
        has_bias=False,
        swiglu_limit=None,
        dp_size=ranks,
        is_sequence_parallel=sequence_parallel,
    )
    BlockFp8ExpertsMethod(Settings(), moe, "model.layers.0.mlp.experts")
    assert os.environ[SKIP_PADDING] == value
