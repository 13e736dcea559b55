# SPDX-License-Identifier: Apache-2.0
"""A linear layer with one FP8 scale per tensor: Transformer Engine's delayed and current scaling.

With `s = fp8_max / amax / 2^margin`, `Q(x) = fp8(clamp(x s)) / s`. Forward `y = Q(x) Q(W)ᵀ + b`, backward `dx = Q(dy) Q(W)`
and `dW = Q(dy)ᵀ Q(x)`. Delayed scaling takes `amax` from calls before: 0 or a value that is not finite leaves the scale as it
was, and scales begin at 1. Source: Transformer Engine, `common/recipe` and `pytorch/fp8.py`. On a GPU codes are multiplied by
`block_gemm`, with a block's scale that is the tensor's; on a CPU in fp32.
"""

from typing import Any, Self

import torch
from torch import Tensor, nn

from vllm_fp8ext.kernels.numerics.quantized import Quantized
from vllm_fp8ext.kernels.numerics.reference import blocks
from vllm_fp8ext.trainer.block_product import runs_kernels
from vllm_fp8ext.trainer.recipe_linear import RecipeLinear
from vllm_fp8ext.trainer.recipes import CurrentScaling, DelayedScaling


class TensorFp8Linear(RecipeLinear[CurrentScaling]):
    """Linear layer with FP8 operands of one scale each. Shapes and dtypes are those of `nn.Linear`.

    With `DelayedScaling` it has buffers, which `state_dict` holds: `amax_history`, fp32 `[3, history]`, newest last, and
    `fp8_scales`, fp32 `[3]`; for input, weight and gradient. Calls in training change them.
    """

    amax_history: Tensor
    fp8_scales: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        recipe: CurrentScaling,
        **factory: Any,
    ) -> None:
        """Make a layer with new weights. `factory`: `device` and `dtype`, as `nn.Linear` takes them."""
        super().__init__(in_features, out_features, bias, recipe=recipe, **factory)
        self._forget(self.weight.device)

    @classmethod
    def of(cls, layer: nn.Linear, recipe: CurrentScaling) -> Self:
        """Return a layer that has the parameters of another one, not copies of them."""
        made = super().of(layer, recipe)
        made._forget(layer.weight.device)
        return made

    def _forget(self, device: torch.device) -> None:
        if isinstance(self.recipe, DelayedScaling):
            self.register_buffer("amax_history", torch.zeros(3, self.recipe.history, device=device))
            self.register_buffer("fp8_scales", torch.ones(3, device=device))

    def product(self, x_MK: Tensor) -> Tensor:
        out: Tensor = _TensorProduct.apply(x_MK, self.weight, self.bias, self)
        return out

    @torch.no_grad()
    def quantize(self, values: Tensor, which: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return codes of `dtype` and the scale that they were multiplied by, fp32 `[]`.

        `which`: 0 for inputs, 1 for weights, 2 for gradients. Delayed scaling remembers the tensor's amax.
        """
        amax = (
            values.detach().abs().amax().float()
            if values.numel()
            else values.new_zeros((), dtype=torch.float32)
        )
        limit = torch.finfo(dtype).max
        if isinstance(self.recipe, DelayedScaling):
            history = self.amax_history[which]
            past = history.max() if self.recipe.algorithm == "max" else history[-1]
            scale = scale_from(past, self.fp8_scales[which], limit, self.recipe.margin)
            if self.training:
                self.fp8_scales[which] = scale
                self.amax_history[which] = torch.cat([history[1:], amax[None]])
        else:
            scale = scale_from(amax, torch.ones_like(amax), limit, self.recipe.margin)
        return (values.float() * scale).clamp(-limit, limit).to(dtype), scale


def scale_from(amax: Tensor, previous: Tensor, limit: float, margin: int) -> Tensor:
    """Return `limit / amax / 2^margin`, fp32; the previous scale where amax is 0 or not finite.

    A quotient beyond fp32 is the largest finite number.
    """
    quotient = (limit / amax / 2.0**margin).clamp_max(torch.finfo(torch.float32).max)
    return torch.where((amax > 0) & torch.isfinite(amax), quotient, previous)


class _TensorProduct(torch.autograd.Function):
    """The formulas at the top of this file."""

    @staticmethod
    def forward(
        ctx: Any, x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, layer: TensorFp8Linear
    ) -> Tensor:
        dtype = layer.recipe.forward_dtype
        x, x_scale = layer.quantize(x_MK, 0, dtype)
        weight, weight_scale = layer.quantize(weight_NK, 1, dtype)
        out = _multiply(x, x_scale, weight, weight_scale, x_MK.dtype)
        ctx.save_for_backward(x, x_scale, weight, weight_scale)
        ctx.layer = layer
        ctx.dtypes = x_MK.dtype, weight_NK.dtype, None if bias_N is None else bias_N.dtype
        return out if bias_N is None else out + bias_N.to(out.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy_MN,) = gradients
        x, x_scale, weight, weight_scale = ctx.saved_tensors
        dtype, weight_dtype, bias_dtype = ctx.dtypes
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        dy, dy_scale = ctx.layer.quantize(dy_MN, 2, ctx.layer.recipe.backward_dtype)
        dx = _multiply(dy, dy_scale, _transposed(weight), weight_scale, dtype) if needs_x else None
        dw = (
            _multiply(_transposed(dy), dy_scale, _transposed(x), x_scale, weight_dtype)
            if needs_weight
            else None
        )
        db = dy_MN.sum(0, dtype=torch.float32).to(bias_dtype) if needs_bias else None
        return dx, dw, db, None


def _multiply(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply codes `[M, K]` by codes `[N, K]`, and divide by both scales: `[M, N]` of a dtype."""
    if not runs_kernels(x):
        return (x.float() @ weight.float().T / (x_scale * weight_scale)).to(dtype)
    from vllm_fp8ext.kernels.gemm.block_gemm import block_gemm

    (tokens, columns), rows = x.shape, weight.shape[0]
    x_scales = x_scale.reciprocal().expand(tokens, blocks(columns))
    return block_gemm(
        Quantized(x, x_scales),
        weight,
        weight_scale.reciprocal().expand(blocks(rows), blocks(columns)),
        dtype,
    )


def _transposed(codes: Tensor) -> Tensor:
    if not runs_kernels(codes):
        return codes.T.contiguous()
    from vllm_fp8ext.kernels.quantize.transpose_blocks import transpose_codes

    return transpose_codes(codes)
