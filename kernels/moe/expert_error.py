# SPDX-License-Identifier: Apache-2.0
"""Bounds the distance of a kernel's result from `reference_experts`, place by place and altogether.

Both round the same numbers at the same places, to BF16 and then to E4M3, but a kernel adds products up in another order and
on tensor cores. That moves a number by a little, P, before it is rounded, and so turns its rounding with probability
P / step, by a whole step: 2^-4 to 2^-3 of the number for E4M3. On average the square of what follows is P * step, however
small P is. One turned rounding alone exceeds any bound made of P, and all of them turned one way would exceed what a wrong
scale does; so variances are bounded, which add up over the hundreds of numbers and the experts that make a result:

1. Gate and up: each of 128 products of a block is cut about 13 bits below the largest one. P of `activation(gate) * up`
   follows from both; a rounding to BF16 in between leaves its average as it is.
2. The largest number of a block makes its scale. A step of BF16 of that one, 2^-8, moves all others against theirs; because
   it moves many at once it is always counted. So P is at least 2^-5 of a step: one turned rounding is at most six standard
   deviations.
3. `down` multiplies P * step by the squares of its weights, and the router by its weight's. The products of `down` are cut
   like the others, and what an expert makes of a token may be rounded to BF16.
4. The sum is rounded to BF16 on both sides.
"""

import torch
from torch import Tensor

from vllm_fp8ext.kernels.moe.experts import ACTIVATIONS, reference_experts
from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.numerics.reference import BLOCK, ScaleFormat

DEVIATIONS, NORM = 7.0, 1.0
"""Standard deviations that one place may be off by, and the norm of all places: one turned rounding and more; and the
expected one, of which kernels measure a half or less, for 2. is counted always."""
TENSOR_CORE = (BLOCK / 3) ** 0.5 * 2.0**-13
"""Standard deviation of 128 products that are cut, relative to the largest."""
STEP = 2.0**-8
"""Twice the largest relative rounding of BF16."""


def experts_error(
    out_MK: Tensor,
    x_MK: Tensor,
    gate_up_E2PK: Tensor,
    gate_up_scales: Tensor,
    down_EKP: Tensor,
    down_scales: Tensor,
    weights_MT: Tensor,
    experts_MT: Tensor,
    activation: str,
    scale_format: ScaleFormat,
) -> float:
    """Largest difference from `reference_experts` of the same operands, as a part of what is allowed: right if below 1.
    NaN is infinite."""
    if not out_MK.numel():
        return 0.0
    weights = gate_up_E2PK, gate_up_scales, down_EKP, down_scales
    expected = reference_experts(x_MK, *weights, weights_MT, experts_MT, activation, scale_format).double()
    variance = _variance(x_MK, *weights, weights_MT, experts_MT, activation, scale_format).double()
    difference, rounding = (out_MK.double() - expected).abs(), STEP * expected.abs() + 1e-30
    place = (difference / (DEVIATIONS * variance.sqrt() + rounding)).nan_to_num(nan=float("inf")).max()
    norm = difference.norm() / (NORM * variance.sum().sqrt() + rounding.norm())
    return float(torch.maximum(place, norm.nan_to_num(nan=float("inf"))))


def _variance(
    x_MK: Tensor,
    gate_up_E2PK: Tensor,
    gate_up_scales: Tensor,
    down_EKP: Tensor,
    down_scales: Tensor,
    weights_MT: Tensor,
    experts_MT: Tensor,
    activation: str,
    scale_format: ScaleFormat,
) -> Tensor:
    """Return the variance of each place of the result, but for its rounding."""
    total_MK = torch.zeros(x_MK.shape, device=x_MK.device)
    quantized = reference.dequantize_activation(*reference.quantize_activation(x_MK, scale_format))
    for expert in range(gate_up_E2PK.shape[0]):
        tokens, choices = (experts_MT == expert).nonzero(as_tuple=True)
        if not len(tokens):
            continue
        x = quantized[tokens]
        gate_up = reference.dequantize_weight(gate_up_E2PK[expert], gate_up_scales[expert])
        gate, up = (x @ gate_up.T).to(x_MK.dtype).float().chunk(2, 1)
        gate_off, up_off = _cut(x, gate_up).chunk(2, 1)
        active = ACTIVATIONS[activation](gate)
        values = (active * up).to(x_MK.dtype)
        off = (ACTIVATIONS[activation](gate + gate_off) - active).abs() * up.abs() + active.abs() * up_off
        off += STEP * values.float().abs()
        codes, scales = reference.quantize_activation(values, scale_format)
        step = _step(codes) * scales.repeat_interleave(BLOCK, 1)
        down = reference.dequantize_weight(down_EKP[expert], down_scales[expert])
        active = reference.dequantize_activation(codes, scales)
        part = (off * (off + step)) @ down.square().T
        part += _cut(active, down).square() + (STEP / 2 * (active @ down.T)).square()
        total_MK.index_add_(0, tokens, part * weights_MT[tokens, choices, None].float().square())
    return total_MK


def _cut(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    """Standard deviation of their product `[M, N]` on tensor cores."""
    largest = [
        torch.stack([part.abs().amax(1) for part in values.split(BLOCK, 1)], 1)
        for values in (x_MK, weight_NK)
    ]
    return TENSOR_CORE * (largest[0].square() @ largest[1].square().T).sqrt()


def _step(codes: Tensor) -> Tensor:
    """From an E4M3 number to the next larger one, in units of its scale."""
    exponents = (codes.view(torch.uint8).int() >> 3 & 15).clamp_min(1)
    return torch.exp2(exponents.float() - 10)
