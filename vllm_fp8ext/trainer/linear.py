# SPDX-License-Identifier: Apache-2.0
"""A linear layer that multiplies what the server serves: the same codes and scales, bit for bit.

With `Q` for quantizing and back, `y = Q(x) Q(W)ᵀ + b`. Gradients go straight through both roundings:

- `dx = Q(dy) Q(W)`: `dy` in groups of 1×128 along N, the weight's 128×128 blocks transposed.
- `dW = Q(dyᵀ) Q(Q(x)ᵀ)ᵀ`: `dyᵀ` in groups of 1×128 along tokens, `xᵀ` in blocks of 128×128.
- `db = Σ dy`, not quantized.

With a backward pass in BF16 neither `dy` nor `xᵀ` is quantized. Between the passes a layer keeps codes and scales of `x`,
about one byte an element. Source: DeepSeek-V3, arXiv 2412.19437, section 3.3, with the blocks that the server's kernels take.
"""

from typing import Any

import torch
from torch import Tensor, nn

from vllm_fp8ext.kernels.gemm.linear import reference_linear
from vllm_fp8ext.kernels.numerics.quantized import Quantized
from vllm_fp8ext.kernels.numerics.reference import BLOCK, blocks
from vllm_fp8ext.trainer.block_product import (
    BlockWeight,
    multiply,
    quantize_blocks,
    quantize_columns,
    quantize_rows,
    row_values,
    transposed_blocks,
)
from vllm_fp8ext.trainer.recipe_linear import RecipeLinear
from vllm_fp8ext.trainer.recipes import FP8_DTYPES, BlockScaling


class BlockFp8Linear(RecipeLinear[BlockScaling]):
    """Linear layer in the server's blockwise FP8, with master weights of any floating dtype.

    Shapes are those of `nn.Linear`: `[…, K]` to `[…, N]`, in the dtype of the input, or autocast's. Inputs are rounded to
    `recipe.served_dtype`, which is what a server has.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, recipe: BlockScaling, **factory: Any
    ) -> None:
        """Make a layer with new weights. `factory`: `device` and `dtype`, as `nn.Linear` takes them."""
        super().__init__(in_features, out_features, bias, recipe=recipe, **factory)
        self._fused: tuple[nn.Linear, ...] = (self,)

    def fuse(self, layers: tuple[nn.Linear, ...]) -> None:
        """Set the layers, from top to bottom, that are one matrix on the server.

        Raises:
            ValueError: Another number of input features, or this layer is not among them.
        """
        if self not in layers or any(layer.in_features != self.in_features for layer in layers):
            widths = [layer.in_features for layer in layers]
            raise ValueError(
                f"layers: expected this one among them, each of {self.in_features} input features, found {widths}"
            )
        # a matrix whose parts begin and end with blocks is quantized as its parts are
        aligned = all(layer.out_features % BLOCK == 0 for layer in layers)
        self._fused = (self,) if aligned else layers

    @torch.no_grad()
    def quantized_weight(self) -> BlockWeight:
        """Quantize the master weight as the server does after a push of it.

        Raises:
            NonFiniteError: NaN or infinity, on a CPU.
        """
        form, dtype = self.recipe.scale_format, self.recipe.served_dtype
        if len(self._fused) == 1:
            return quantize_blocks(self.weight.detach().to(dtype), form)
        whole = quantize_blocks(torch.cat([layer.weight.detach().to(dtype) for layer in self._fused]), form)
        position = self._fused.index(self)
        first = sum(layer.out_features for layer in self._fused[:position])
        last = first + self.out_features
        return BlockWeight(
            whole.codes[first:last].contiguous(),
            whole.scales[first // BLOCK : blocks(last)],
            first % BLOCK,
        )

    def product(self, x_MK: Tensor) -> Tensor:
        out: Tensor = _BlockProduct.apply(x_MK, self.weight, self.bias, self.quantized_weight(), self.recipe)
        return out


class _BlockProduct(torch.autograd.Function):
    """The formulas at the top of this file."""

    @staticmethod
    def forward(
        ctx: Any,
        x_MK: Tensor,
        master_NK: Tensor,
        bias_N: Tensor | None,
        weight: BlockWeight,
        recipe: BlockScaling,
    ) -> Tensor:
        served = x_MK.to(recipe.served_dtype)
        quantized = quantize_rows(served, recipe.scale_format)
        if served.is_cuda:
            out = multiply(quantized, weight, served.dtype, recipe.gemm)
        else:  # the operator of the server's CPU backend
            out = reference_linear(served, weight.values(), recipe.scale_format)
        if bias_N is not None:
            out = out + bias_N.to(out.dtype)
        ctx.save_for_backward(*quantized, weight.codes, weight.scales)
        ctx.offset, ctx.recipe = weight.offset, recipe
        ctx.dtypes = x_MK.dtype, master_NK.dtype, None if bias_N is None else bias_N.dtype
        return out.to(x_MK.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy_MN,) = gradients
        codes_MK, scales_MKb, codes_NK, scales_NbKb = ctx.saved_tensors
        quantized, weight = Quantized(codes_MK, scales_MKb), BlockWeight(codes_NK, scales_NbKb, ctx.offset)
        dtype, master_dtype, bias_dtype = ctx.dtypes
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        in_blocks = ctx.recipe.backward != "bf16"
        to_input, to_weight = (
            (_input_gradient, _weight_gradient) if in_blocks else (_plain_input, _plain_weight)
        )
        dx = to_input(dy_MN, weight, ctx.recipe).to(dtype) if needs_x else None
        dw = to_weight(dy_MN, quantized, ctx.recipe, master_dtype) if needs_weight else None
        db = dy_MN.sum(0, dtype=torch.float32).to(bias_dtype) if needs_bias else None
        return dx, dw, db, None, None


def _plain_input(dy_MN: Tensor, weight: BlockWeight, _: BlockScaling) -> Tensor:
    return dy_MN @ weight.values(dy_MN.dtype)


def _plain_weight(dy_MN: Tensor, x: Quantized, _: BlockScaling, dtype: torch.dtype) -> Tensor:
    return (dy_MN.T @ row_values(x, dy_MN.dtype)).to(dtype)


def _input_gradient(dy_MN: Tensor, weight: BlockWeight, recipe: BlockScaling) -> Tensor:
    dy = quantize_rows(dy_MN, recipe.scale_format, _gradient_dtype(recipe))
    if weight.offset:
        return row_values(dy) @ weight.values()
    return multiply(dy, weight.transposed(), torch.promote_types(dy_MN.dtype, torch.bfloat16), recipe.gemm)


def _weight_gradient(dy_MN: Tensor, x: Quantized, recipe: BlockScaling, dtype: torch.dtype) -> Tensor:
    if not dy_MN.shape[0]:  # no quantizer takes a group of no tokens
        return torch.zeros(dy_MN.shape[1], x.codes.shape[1], dtype=dtype, device=dy_MN.device)
    dy = quantize_columns(dy_MN, recipe.scale_format, _gradient_dtype(recipe))
    return multiply(dy, transposed_blocks(x, recipe.scale_format), dtype, recipe.gemm)


def _gradient_dtype(recipe: BlockScaling) -> torch.dtype:
    assert recipe.backward != "bf16"
    return FP8_DTYPES[recipe.backward]
