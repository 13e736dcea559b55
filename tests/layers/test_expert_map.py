# SPDX-License-Identifier: Apache-2.0
"""Experts of a rank that has some of them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_fp8ext.config import Settings
from vllm_fp8ext.layers import experts as module
from vllm_fp8ext.layers.experts import CODES, SCALES, BlockFp8ExpertsMethod


def test_what_pads_a_batch_goes_to_no_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM chooses -1 for it, which is no place in the map of experts."""
    seen: list[list[list[int]]] = []

    def noted(x: torch.Tensor, *given: Any) -> torch.Tensor:
        seen.append(given[5].tolist())
        return x

    monkeypatch.setattr(module, "reference_experts", noted)
    method: Any = BlockFp8ExpertsMethod.__new__(BlockFp8ExpertsMethod)
    method.route, method.scale_format, method.shadow = None, "fp32", False
    method.moe = SimpleNamespace(dp_size=1, is_sequence_parallel=False)
    held = dict.fromkeys((*CODES, *SCALES))
    chosen = torch.tensor([[0, 5], [-1, -1], [7, 4]], dtype=torch.int32)
    for expert_map in (None, torch.tensor([-1, -1, -1, -1, 0, 1, 2, 3], dtype=torch.int32)):
        layer: Any = SimpleNamespace(expert_map=expert_map, activation=SimpleNamespace(value="silu"), **held)
        method.apply(layer, torch.ones(3, 4), torch.ones(3, 2), chosen, None, None)
    assert seen == [[[0, 5], [-1, -1], [7, 4]], [[-1, 1], [-1, -1], [3, 0]]]


class Group:
    """In place of the ranks that share out experts: this one's tokens are the first half of all."""

    def dispatch(self, *given: Any) -> tuple[torch.Tensor, ...]:
        *tensors, in_sequence = given
        assert in_sequence is False
        return tuple(torch.cat([tensor, tensor]) for tensor in tensors)

    def combine(self, out: torch.Tensor, in_sequence: bool) -> torch.Tensor:
        assert in_sequence is False
        return out[: len(out) // 2]


@pytest.mark.parametrize(("ranks", "rows"), [(1, 3), (2, 6)])
def test_experts_are_chosen_before_tokens_go_to_other_ranks(
    ranks: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's mask of padding is of one rank's tokens, and its kernel refuses it for those of all."""
    seen: list[torch.Tensor] = []

    def noted(x: torch.Tensor, *given: Any) -> torch.Tensor:
        seen.append(given[5])
        return x * 2

    monkeypatch.setattr(module, "reference_experts", noted)
    monkeypatch.setattr(module, "get_ep_group", Group)
    moe: Any = SimpleNamespace(
        activation=SimpleNamespace(value="silu"),
        has_bias=False,
        swiglu_limit=None,
        dp_size=ranks,
        is_sequence_parallel=False,
    )
    method = BlockFp8ExpertsMethod(Settings(), moe, "model.layers.0.mlp.experts")
    assert method.supports_internal_mk == (ranks > 1), "vLLM then brings no tokens"
    held = dict.fromkeys((*CODES, *SCALES))
    layer: Any = SimpleNamespace(expert_map=None, activation=SimpleNamespace(value="silu"), **held)
    chosen = torch.tensor([[0, 1], [-1, -1], [1, 2]], dtype=torch.int32)
    x = torch.arange(12.0).view(3, 4)
    out = method.apply(layer, x, torch.ones(3, 2), chosen, None, None)
    assert torch.equal(out, x * 2)
    assert seen[0].shape == (rows, 2)


def test_a_shadow_computes_beside_other_ranks() -> None:
    moe: Any = SimpleNamespace(
        activation=SimpleNamespace(value="silu"), has_bias=False, swiglu_limit=None, dp_size=2
    )
    assert not BlockFp8ExpertsMethod(Settings(), moe, "experts", shadow=True).supports_internal_mk
