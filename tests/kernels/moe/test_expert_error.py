# SPDX-License-Identifier: Apache-2.0
"""The bound of experts: what tensor cores may do stays within it, and what a kernel may get wrong does not."""

from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_fp8ext.kernels.moe.expert_error import BLOCK, experts_error
from vllm_fp8ext.kernels.moe.experts import ACTIVATIONS, reference_experts
from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.numerics.reference import ScaleFormat
from vllm_fp8ext.kernels.testing import hard_cases

TOKENS, HIDDEN, WIDTH, EXPERTS, CHOSEN = 8, 512, 256, 12, 8
CUT = 2.0**-13


@pytest.fixture(scope="module", params=["fp32", "pow2"])
def case(request: pytest.FixtureRequest) -> hard_cases.ExpertCase:
    form: ScaleFormat = request.param
    return hard_cases.experts(TOKENS, HIDDEN, WIDTH, EXPERTS, CHOSEN, "cpu", scale_format=form)


def cut_product(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    """`x @ weight.T`, each product cut as tensor cores cut it: to a multiple of 2^-13 of its block's largest one."""
    total = torch.zeros(len(x_MK), len(weight_NK))
    for x, weight in zip(x_MK.split(BLOCK, 1), weight_NK.split(BLOCK, 1), strict=True):
        products = x[:, None] * weight[None]
        unit = CUT * torch.exp2(products.abs().amax(2, keepdim=True).clamp_min(1e-30).log2().floor())
        total += ((products / unit).trunc() * unit).sum(2)
    return total


def on_tensor_cores(case: hard_cases.ExpertCase, short: torch.dtype) -> Tensor:
    """The definition with such products, and results of experts in `short`."""
    x, parts = (
        reference.dequantize_activation(*reference.quantize_activation(case.x_MK, case.scale_format)),
        [],
    )
    for token, of in enumerate(case.experts_MT.tolist()):
        for expert in of:
            weights = reference.dequantize_weight(case.gate_up[expert], case.gate_up_scales[expert])
            gate, up = cut_product(x[token : token + 1], weights).bfloat16().chunk(2, 1)
            active = reference.quantize_activation(ACTIVATIONS["silu"](gate) * up, case.scale_format)
            down = reference.dequantize_weight(case.down[expert], case.down_scales[expert])
            parts.append(cut_product(reference.dequantize_activation(*active), down).to(short).float())
    result = torch.cat(parts).view(TOKENS, CHOSEN, HIDDEN)
    return (result * case.weights_MT[:, :, None]).sum(1).bfloat16()


@pytest.mark.parametrize("short", [torch.float32, torch.bfloat16])
def test_tensor_cores_stay_within_it(case: hard_cases.ExpertCase, short: torch.dtype) -> None:
    out = on_tensor_cores(case, short)
    assert 0.01 < experts_error(out, *case.operands) < 0.9
    assert experts_error(reference_experts(*case.operands), *case.operands) == 0


def wrong(case: hard_cases.ExpertCase, mistake: str) -> tuple[Any, ...]:
    """Operands that differ at one place."""
    operands = [part.clone() if isinstance(part, Tensor) else part for part in case.operands]
    weights, of = operands[5], operands[6]
    one = int(of[0, 0])
    if mistake == "scale of gate":
        operands[2][one, 0, 0] *= 2
    elif mistake == "scale of up":
        operands[2][one, WIDTH // BLOCK, 0] *= 2
    elif mistake == "scale of down":
        operands[4][one, 0, 1] *= 2
    elif mistake == "gate and up":
        operands[1][one] = operands[1][one].roll(WIDTH, 0)
    elif mistake == "another expert":
        of[0, 0] = next(expert for expert in range(EXPERTS) if expert not in of[0].tolist())
    elif mistake == "experts swapped":
        weights[0, :2] = weights[0, [1, 0]]
    elif mistake == "expert left out":
        of[0, -1] = -1
    elif mistake == "scales of activations":
        operands[8] = "pow2" if operands[8] == "fp32" else "fp32"
    return tuple(operands)


MISTAKES = ("scale of gate", "scale of up", "scale of down", "gate and up", "another expert")
MISTAKES += ("experts swapped", "expert left out", "scales of activations")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_do_not(case: hard_cases.ExpertCase, mistake: str) -> None:
    assert experts_error(reference_experts(*wrong(case, mistake)), *case.operands) > 1


def test_nothing_else_is_finite_or_there(case: hard_cases.ExpertCase) -> None:
    out = reference_experts(*case.operands)
    out[3, 5] = torch.nan
    assert experts_error(out, *case.operands) == float("inf")
    none = case.x_MK[:0], *case.operands[1:5], case.weights_MT[:0], case.experts_MT[:0], "silu", "fp32"
    assert experts_error(out[:0], *none) == 0
