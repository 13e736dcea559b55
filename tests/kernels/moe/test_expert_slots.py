# SPDX-License-Identifier: Apache-2.0
"""What the experts' kernels for few tokens read: codes as the reference makes them, and each expert's slots in order."""

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton, which the CPU build does not bring")
from vllm_fp8ext.kernels.moe.expert_slots import ROOM, SCANNED, expert_slots
from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.numerics.reference import ScaleFormat
from vllm_fp8ext.kernels.testing import kernel_cases


@pytest.mark.parametrize("form", ["fp32", pytest.param("pow2", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("tokens", "each", "experts", "hidden"),
    [(1, 2, 8, 256), (5, 8, 60, 200), (SCANNED // 8 + 3, 8, 160, 128), (3, 8, 256, 1280)],
)
def test_slots_of_each_expert_in_order(
    tokens: int, each: int, experts: int, hidden: int, form: ScaleFormat, device: str
) -> None:
    x = kernel_cases.activations(tokens, hidden, device)
    of = kernel_cases.routing(tokens, experts, each, device)[1]
    of = torch.where(of % 3 == 1, -1, of)
    result, slots = expert_slots(x, of, experts, form)
    codes, scales = reference.quantize_activation(x, form)
    assert torch.equal(result.codes.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(result.scales, scales)
    assert slots.slots.shape[1] % ROOM == 0
    for expert in range(experts):
        expected = (of.flatten() == expert).nonzero()[:, 0]
        assert int(slots.counts[expert]) == len(expected)
        assert torch.equal(slots.slots[expert, : len(expected)].long(), expected), expert


def test_an_expert_that_everything_goes_to(device: str) -> None:
    tokens, each = SCANNED // 16 + 1, 16
    of = torch.ones(tokens, each, dtype=torch.int32, device=device)
    slots = expert_slots(kernel_cases.activations(tokens, 128, device), of, 3, "fp32")[1]
    assert slots.counts.tolist() == [0, tokens * each, 0]
    assert slots.slots[1, : tokens * each].tolist() == list(range(tokens * each))


def test_no_slots_where_none_are_listed(device: str) -> None:
    x = kernel_cases.activations(2, 128, device)
    result, slots = expert_slots(
        x, torch.zeros(2, 1, dtype=torch.int32, device=device), 4, "fp32", listed=False
    )
    assert slots.slots.shape == (4, 0)
    assert torch.equal(result.scales, reference.quantize_activation(x, "fp32")[1])
