# SPDX-License-Identifier: Apache-2.0
"""Gated experts in plain torch: the one definition of how tokens pass through block-FP8 experts.

A token goes through each of its experts as through a dense MLP: quantized per 128 columns, `gate` and `up` accumulated in
fp32 and rounded to the dtype of the token, `activation(gate) * up` rounded likewise and quantized again, and `down`
accumulated in fp32. The results are weighted and added up in fp32, in the order of the token's experts, and rounded once.

Shape suffixes: M tokens, K hidden size, P intermediate size padded with zeros to a multiple of 128, E experts, T experts of a
token.
"""

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.numerics.reference import ScaleFormat
from vllm_fp8ext.kernels.runtime.operators import operator

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda gate: F.gelu(gate, approximate="tanh"),
}
"""Functions of the gate, by the name that vLLM gives them."""


def _like_experts(x_MK: Tensor, *_rest: object) -> Tensor:
    return torch.empty_like(x_MK)


@operator(_like_experts)
def reference_experts(
    x_MK: Tensor,
    gate_up_E2PK: Tensor,
    gate_up_scales: Tensor | None,
    down_EKP: Tensor,
    down_scales: Tensor | None,
    weights_MT: Tensor,
    experts_MT: Tensor,
    activation: str,
    scale_format: str,
) -> Tensor:
    """Add up the weighted results of each token's experts: `[M, K]` in the dtype of `x_MK`.

    Weights are codes with their scales, fp32 `[E, blocks, blocks]`, or dequantized fp32 values without scales. Where
    `experts_MT` is negative, another rank has the expert and nothing is added.
    """
    form = cast("ScaleFormat", scale_format)
    parts_MTK = torch.zeros(*experts_MT.shape, x_MK.shape[1], dtype=torch.float32, device=x_MK.device)
    quantized = reference.dequantize_activation(*reference.quantize_activation(x_MK, form))
    for expert in range(gate_up_E2PK.shape[0]):
        tokens, slots = (experts_MT == expert).nonzero(as_tuple=True)
        if not len(tokens):
            continue
        gate_up = F.linear(quantized[tokens], _values(gate_up_E2PK, gate_up_scales, expert)).to(x_MK.dtype)
        gate, up = gate_up.chunk(2, dim=1)
        active = reference.quantize_activation(ACTIVATIONS[activation](gate) * up, form)
        down = _values(down_EKP, down_scales, expert)
        parts_MTK[tokens, slots] = F.linear(reference.dequantize_activation(*active), down)
    out_MK = torch.zeros_like(x_MK, dtype=torch.float32)
    for slot in range(experts_MT.shape[1]):
        out_MK += parts_MTK[:, slot] * weights_MT[:, slot, None].float()
    return out_MK.to(x_MK.dtype)


def _values(weights: Tensor, scales: Tensor | None, expert: int) -> Tensor:
    return weights[expert] if scales is None else reference.dequantize_weight(weights[expert], scales[expert])
