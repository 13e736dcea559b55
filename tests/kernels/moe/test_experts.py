# SPDX-License-Identifier: Apache-2.0
"""The reference of experts against dense MLPs, one token and one expert at a time."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_fp8ext.kernels.moe.experts import ACTIVATIONS, reference_experts
from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.numerics.reference import BLOCK, ScaleFormat, blocks

TOKENS, HIDDEN, EXPERTS, CHOSEN = 9, 192, 5, 3


def padded(width: int) -> int:
    return blocks(width) * BLOCK


def quantized(weights: Tensor, width: int, form: ScaleFormat) -> tuple[Tensor, Tensor, list[list[Tensor]]]:
    """Codes and scales of gate and up `[E, 2 * width, HIDDEN]`, each padded; and what each stands for."""
    height = 2 * padded(width)
    codes = torch.zeros(len(weights), height, HIDDEN, dtype=torch.float8_e4m3fn)
    scales = torch.ones(len(weights), height // BLOCK, blocks(HIDDEN))
    values: list[list[Tensor]] = []
    for expert, weight in enumerate(weights):
        parts = [reference.quantize_weight(part, form) for part in weight.split(width)]
        for top, (own, scale) in zip((0, padded(width)), parts, strict=True):
            codes[expert, top : top + width] = own
            scales[expert, top // BLOCK : top // BLOCK + len(scale)] = scale
        values.append([reference.dequantize_weight(*part) for part in parts])
    return codes, scales, values


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("width", [128, 96, 320])
@pytest.mark.parametrize("form", ["fp32", "pow2"])
def test_a_token_goes_through_its_experts_as_through_dense_layers(
    activation: str, width: int, form: ScaleFormat
) -> None:
    noise = torch.Generator().manual_seed(width)
    x = torch.randn(TOKENS, HIDDEN, generator=noise).bfloat16()
    first = torch.randn(EXPERTS, 2 * width, HIDDEN, generator=noise) / HIDDEN**0.5
    second = torch.randn(EXPERTS, HIDDEN, width, generator=noise) / width**0.5
    gate_up, gate_up_scales, gates = quantized(first, width, form)
    down = torch.zeros(EXPERTS, HIDDEN, padded(width), dtype=torch.float8_e4m3fn)
    down_scales = torch.ones(EXPERTS, blocks(HIDDEN), blocks(width))
    for expert, weight in enumerate(second):
        down[expert, :, :width], down_scales[expert] = reference.quantize_weight(weight, form)
    chosen = torch.stack([torch.randperm(EXPERTS, generator=noise)[:CHOSEN] for _ in range(TOKENS)])
    chosen[0, 1] = -1
    weights = torch.rand(TOKENS, CHOSEN, generator=noise)
    out = reference_experts(
        x, gate_up, gate_up_scales, down, down_scales, weights, chosen.int(), activation, form
    )
    expected = torch.zeros(TOKENS, HIDDEN)
    for token in range(TOKENS):
        for slot in range(CHOSEN):
            expert = int(chosen[token, slot])
            if expert < 0:
                continue
            one = reference.dequantize_activation(*reference.quantize_activation(x[token : token + 1], form))
            gate, up = (F.linear(one, weight).bfloat16() for weight in gates[expert])
            active = reference.quantize_activation(ACTIVATIONS[activation](gate) * up, form)
            values = reference.dequantize_weight(down[expert, :, :width], down_scales[expert])
            part = F.linear(reference.dequantize_activation(*active), values)
            expected[token] += (part * weights[token, slot])[0]
    # sums of other orders in fp32, which may turn a rounding to BF16 and, before `down`, to E4M3
    torch.testing.assert_close(out.float(), expected, rtol=2**-7, atol=2e-3)
    dense = [reference.dequantize_weight(c, s) for c, s in zip(gate_up, gate_up_scales, strict=True)]
    back = [reference.dequantize_weight(c, s) for c, s in zip(down, down_scales, strict=True)]
    same = reference_experts(
        x, torch.stack(dense), None, torch.stack(back), None, weights, chosen.int(), activation, form
    )
    assert torch.equal(out, same)


def test_experts_that_no_token_takes_are_not_read() -> None:
    x = torch.ones(2, HIDDEN, dtype=torch.bfloat16)
    gate_up = torch.full((2, 256, HIDDEN), torch.nan)
    down = torch.full((2, HIDDEN, 128), torch.nan)
    gate_up[1], down[1] = 0.01, 0.01
    out = reference_experts(
        x, gate_up, None, down, None, torch.ones(2, 1), torch.ones(2, 1, dtype=torch.int32), "silu", "fp32"
    )
    assert torch.isfinite(out).all()
    assert bool((out > 0).all())


def test_no_tokens() -> None:
    out = reference_experts(
        *(torch.empty(0, HIDDEN, dtype=torch.bfloat16), torch.ones(2, 256, HIDDEN), None),
        *(torch.ones(2, HIDDEN, 128), None, torch.empty(0, 2), torch.empty(0, 2, dtype=torch.int32)),
        *("silu", "fp32"),
    )
    assert out.shape == (0, HIDDEN)
