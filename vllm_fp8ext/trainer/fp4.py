# SPDX-License-Identifier: Apache-2.0
"""Linear layers in simulated FP4: E2M1 with a differentiable gradient estimator and outlier clamping.

E2M1 has the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6, and is exact in E4M3: codes here are E4M3 values, so that FP8 products
compute what FP4 hardware would. With γ = amax / 6, one for each output channel of a weight and each token of an input:

    Q(x) = γ e2m1(x / γ)
    y = Q(clamp(x)) Q(W)ᵀ + Δx Q(W)ᵀ + b        Δx = x − clamp(x), not quantized

- OCC, outlier clamping and compensation: `clamp` cuts the tensor at its α and 1 − α quantiles (α = 0.99). The residual Δx is
  not 0 for 2 % of the values.
- DGE, the differentiable gradient estimator: `dW = (dyᵀ x̂) f′(W / γ)`, with x̂ the quantized input and its residual. Between
  two neighbours, δ apart, with u the distance from the lower one, `f(u) = δ/2 (1 + sign(2u/δ − 1) |2u/δ − 1|^(1/k))`. Its
  derivative is `f′(u) = |2u/δ − 1|^(1/k − 1) / k`, at most 3 (k = 5). Without DGE, f′ = 1: straight through.

Inputs get `dx = dy Q(W)`. Gradients are not quantized. Source: "Optimizing Large Language Model Training Using FP4
Quantization", arXiv 2501.17116, sections 3.1 and 3.2.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_fp8ext.kernels.numerics.reference import AMAX_FLOOR, NonFiniteError
from vllm_fp8ext.trainer.recipe_linear import RecipeLinear

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of E2M1."""
LARGEST = 6.0
"""Largest magnitude of E2M1."""
LARGEST_SLOPE = 3.0
"""Bound on the estimator's derivative, as the paper's."""


@dataclass(frozen=True, kw_only=True)
class Fp4Recipe:
    """Parts of the method. Without both, FP4 is direct: rounded, with gradients straight through.

    Raises:
        ValueError: A setting out of its range.
    """

    estimator: float | None = 5.0
    """Exponent k of the differentiable gradient estimator; None: straight through."""
    quantile: float | None = 0.99
    """Quantile α of outlier clamping; None: no value is clamped."""

    def __post_init__(self) -> None:
        if self.estimator is not None and not self.estimator >= 1:
            raise ValueError(f"estimator: expected k >= 1 or None, found {self.estimator}")
        if self.quantile is not None and not 0.5 < self.quantile < 1:
            raise ValueError(f"quantile: expected a number between 0.5 and 1, or None, found {self.quantile}")


def quantize_e2m1(values_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize rows: codes `[M, K]`, E4M3 values that are E2M1's, and scales γ, fp32 `[M, 1]`.

    Rounds to nearest, of two equally near to the one with an even code. NaN in a row makes its scale NaN.
    """
    values = values_MK.float()
    scales = values.abs().amax(-1, keepdim=True).clamp_min(AMAX_FLOOR) / LARGEST
    magnitude = (values / scales).abs()
    # torch rounds halves to even
    step = _spacing(magnitude)
    rounded = (torch.round(magnitude / step) * step).clamp_max(LARGEST)
    return torch.copysign(rounded, values).to(torch.float8_e4m3fn), scales


def _spacing(magnitude: Tensor) -> Tensor:
    """Return how far apart E2M1's neighbours are: 0.5 below 2, 1 below 4, and 2 from there on."""
    return torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))


def estimator_slope(scaled: Tensor, k: float) -> Tensor:
    """Return f′ of values `W / γ`, fp32 of their shape: 1/k at E2M1's values, up to 3 in the middle between two."""
    magnitude = scaled.float().abs().clamp_max(LARGEST)
    size = _spacing(magnitude)
    lower = torch.floor(magnitude / size) * size
    centered = (2 * (magnitude - lower) / size - 1).abs()
    return (centered.pow(1 / k - 1) / k).clamp_max(LARGEST_SLOPE)


def clamp_outliers(values: Tensor, quantile: float) -> tuple[Tensor, Tensor]:
    """Return the values, cut at the quantiles α and 1 − α, and the residual. Both of the input's shape.

    Quantiles are values of the tensor. With n values, `n − floor(α n)` are at or above the upper one, ties aside.
    """
    flat = values.reshape(-1)
    cut = max(1, flat.numel() - int(quantile * flat.numel()))
    high = flat.topk(cut).values[-1]
    low = flat.topk(cut, largest=False).values[-1]
    clamped = values.clamp(low, high)
    return clamped, values - clamped


class Fp4Linear(RecipeLinear[Fp4Recipe]):
    """Linear layer that multiplies in simulated FP4. Shapes and dtypes are those of `nn.Linear`.

    Weights are master weights of any floating dtype. It shows a method's loss, not its speed.
    """

    def product(self, x_MK: Tensor) -> Tensor:
        out: Tensor = _Fp4Product.apply(x_MK, self.weight, self.bias, self.recipe)
        return out


class _Fp4Product(torch.autograd.Function):
    """The formulas at the top of this file."""

    @staticmethod
    def forward(
        ctx: Any, x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, recipe: Fp4Recipe
    ) -> Tensor:
        codes, scales = quantize_e2m1(weight_NK)
        if not scales.is_cuda and not bool(torch.isfinite(scales).all()):
            raise NonFiniteError("weight: expected finite values, found NaN or infinity")
        clamped, residual = x_MK, None
        if recipe.quantile is not None and x_MK.numel():
            clamped, residual = clamp_outliers(x_MK, recipe.quantile)
        x_codes, x_scales = quantize_e2m1(clamped)
        # codes multiply exactly in FP8, and are accumulated in fp32; scales of rows and columns come after
        out = (x_codes.float() @ codes.float().T) * x_scales * scales.T
        quantized = x_codes.float() * x_scales
        if residual is not None:
            out = out + residual.float() @ (codes.float() * scales).T
            quantized = quantized + residual.float()
        if bias_N is not None:
            out = out + bias_N.float()
        ctx.save_for_backward(quantized.to(x_MK.dtype), codes, scales, weight_NK)
        ctx.recipe, ctx.bias = recipe, None if bias_N is None else bias_N.dtype
        return out.to(x_MK.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dy = gradients[0].float()
        quantized, codes, scales, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        dx = (dy @ (codes.float() * scales)).to(quantized.dtype) if needs_x else None
        dw = None
        if needs_weight:
            dw = dy.T @ quantized.float()
            if ctx.recipe.estimator is not None:
                dw = dw * estimator_slope(weight.float() / scales, ctx.recipe.estimator)
            dw = dw.to(weight.dtype)
        db = dy.sum(0).to(ctx.bias) if needs_bias else None
        return dx, dw, db, None
