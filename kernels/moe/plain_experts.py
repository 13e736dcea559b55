# SPDX-License-Identifier: Apache-2.0
"""Experts in 16 bits in plain torch: the definition of activations, biases and weighted inputs that FP8 experts do not have.

Shape suffixes: M tokens, K hidden size, N rows of the first matrix (gate and up, or one of both), P intermediate size,
E experts, T experts of a token.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_fp8ext.kernels.runtime.operators import operator

LIMIT, ALPHA = 7.0, 1.702
"""Constants of the SwiGLU of gpt-oss."""


class Swiglu(NamedTuple):
    """A limited SwiGLU: gates at most `limit`, ups within it, `(up + beta) * gate * sigmoid(alpha * gate)`."""

    limit: float
    alpha: float
    beta: float

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + self.beta) * gate * torch.sigmoid(self.alpha * gate)


GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda gate: F.gelu(gate, approximate="tanh"),
    "relu2": lambda gate: F.relu(gate).square(),
}
"""Functions of the gate, by the name that vLLM gives them; with `_no_mul` behind it, of experts without a gate."""


def is_known(activation: str) -> bool:
    """Tell whether experts with vLLM's activation of this name are defined here."""
    return activation.removesuffix("_no_mul") in GATES or activation in (
        "swigluoai",
        "swigluoai_uninterleave",
    )


def activate(activation: str, hidden_MN: Tensor, swiglu: Swiglu | None) -> Tensor:
    """Return `[M, P]` of what the first matrix gives. `swigluoai` has gates and ups in turn, others the gates first."""
    if activation.endswith("_no_mul"):
        return GATES[activation.removesuffix("_no_mul")](hidden_MN)
    if activation == "swigluoai":
        return (swiglu or Swiglu(LIMIT, ALPHA, 1.0))(hidden_MN[:, ::2], hidden_MN[:, 1::2])
    gate, up = hidden_MN.chunk(2, dim=1)
    if swiglu is not None:
        return swiglu(gate, up)
    return GATES[activation](gate) * up


def _like_experts(x_MK: Tensor, *_rest: object) -> Tensor:
    return torch.empty_like(x_MK)


@operator(_like_experts)
def plain_experts(
    x_MK: Tensor,
    first_ENK: Tensor,
    first_bias_EN: Tensor | None,
    second_EKP: Tensor,
    second_bias_EK: Tensor | None,
    weights_MT: Tensor,
    experts_MT: Tensor,
    activation: str,
    limits: list[float],
    weigh_input: bool,
) -> Tensor:
    """Add up the weighted results of each token's experts: `[M, K]` in the dtype of `x_MK`.

    Sums are fp32; what each matrix gives, with its bias, and what the activation gives are rounded to the dtype of `x_MK`.
    `limits`: of a limited SwiGLU, limit, alpha and beta; else empty. `weigh_input`: the weights multiply what goes in, not
    what comes out. Where `experts_MT` is negative, another rank has the expert and nothing is added.
    """
    swiglu = Swiglu(*limits) if limits else None
    parts_MTK = torch.zeros(*experts_MT.shape, x_MK.shape[1], dtype=torch.float32, device=x_MK.device)
    for expert in range(first_ENK.shape[0]):
        tokens, slots = (experts_MT == expert).nonzero(as_tuple=True)
        if not len(tokens):
            continue
        x = x_MK[tokens]
        if weigh_input:
            x = x * weights_MT[tokens, slots, None].to(x.dtype)
        hidden = _product(x, first_ENK[expert], first_bias_EN, expert)
        active = activate(activation, hidden.float(), swiglu).to(x_MK.dtype)
        parts_MTK[tokens, slots] = _product(active, second_EKP[expert], second_bias_EK, expert).float()
    if not weigh_input:
        parts_MTK *= weights_MT[..., None].float()
    return parts_MTK.sum(1).to(x_MK.dtype)


def _product(x: Tensor, weight: Tensor, biases: Tensor | None, expert: int) -> Tensor:
    bias = None if biases is None else biases[expert].float()
    return F.linear(x.float(), weight.float(), bias).to(x.dtype)
