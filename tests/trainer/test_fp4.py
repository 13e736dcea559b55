# SPDX-License-Identifier: Apache-2.0
"""Simulated FP4, held to tables and float64 products, and its estimator to numerical derivatives."""

import pytest
import torch
from torch import Tensor, nn

from vllm_fp8ext.kernels.numerics.reference import NonFiniteError
from vllm_fp8ext.trainer.convert import convert
from vllm_fp8ext.trainer.fp4 import (
    E2M1,
    Fp4Linear,
    Fp4Recipe,
    clamp_outliers,
    estimator_slope,
    quantize_e2m1,
)

DIRECT = Fp4Recipe(estimator=None, quantile=None)


@pytest.fixture
def noise() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_codes_are_the_nearest_of_e2m1(noise: torch.Generator) -> None:
    values = torch.randn(50, 64, generator=noise)
    codes, scales = quantize_e2m1(values)
    table = torch.tensor([*(-each for each in E2M1), *E2M1], dtype=torch.float64)
    scaled = values.double() / scales.double()
    assert set(codes.double().abs().unique().tolist()) == set(E2M1)
    assert torch.all((codes.double() - scaled).abs() <= (scaled[..., None] - table).abs().amin(-1) + 1e-6)
    torch.testing.assert_close(scales, values.abs().amax(1, keepdim=True) / 6)


def test_ties_go_to_even_codes_and_zeros_stay() -> None:
    """The middles between neighbours: codes alternate between even and odd along the magnitudes."""
    row = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -5.0]])
    assert quantize_e2m1(row)[0].float().tolist() == [[0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, -0.0, -4.0]]
    codes, scales = quantize_e2m1(torch.zeros(2, 3))
    assert not codes.float().any()
    assert torch.isfinite(scales).all()


@pytest.mark.parametrize("k", [3.0, 5.0])
def test_the_slope_is_the_derivative_of_the_estimator(k: float, noise: torch.Generator) -> None:
    def estimator(x: Tensor) -> Tensor:
        table = torch.tensor(E2M1, dtype=torch.float64)
        index = (torch.searchsorted(table, x, right=True) - 1).clamp(0, len(E2M1) - 2)
        low, size = table[index], table[index + 1] - table[index]
        centered = 2 * (x - low) / size - 1
        return low + size / 2 * (1 + centered.sign() * centered.abs() ** (1 / k))

    x = torch.rand(500, generator=noise, dtype=torch.float64) * 5.99
    numeric = (estimator(x + 1e-7) - estimator(x - 1e-7)) / 2e-7
    inside = (numeric < 2.9) & ((x[:, None] - torch.tensor(E2M1)).abs().amin(1) > 1e-3)
    slope = estimator_slope(x, k)
    torch.testing.assert_close(slope[inside].double(), numeric[inside], rtol=1e-3, atol=1e-4)
    assert inside.sum() > 300
    assert torch.equal(estimator_slope(-x, k), slope)
    assert slope.max() <= 3
    assert estimator_slope(torch.tensor([0.25, 5.0]), k).tolist() == [3.0, 3.0]


def test_outliers_are_cut_at_quantiles(noise: torch.Generator) -> None:
    values = torch.randn(40, 50, generator=noise)
    clamped, residual = clamp_outliers(values, 0.99)
    ordered = values.flatten().sort().values
    assert (clamped.min(), clamped.max()) == (ordered[19], ordered[-20])
    torch.testing.assert_close(clamped + residual, values)
    assert int((residual != 0).sum()) == 38


@pytest.mark.parametrize(
    "recipe",
    [DIRECT, Fp4Recipe(quantile=None), Fp4Recipe(estimator=None), Fp4Recipe()],
    ids=["direct", "dge", "occ", "dge-occ"],
)
def test_products_and_gradients(recipe: Fp4Recipe, noise: torch.Generator) -> None:
    layer = Fp4Linear(48, 32, recipe=recipe)
    x, dy = torch.randn(20, 48, generator=noise), torch.randn(20, 32, generator=noise)
    x[3, 5] = 40.0
    x.requires_grad_()
    out = layer(x)
    out.backward(dy)

    def rounded(values: Tensor) -> Tensor:
        codes, scales = quantize_e2m1(values.detach())
        return codes.double() * scales.double()

    weight, inputs = rounded(layer.weight), rounded(x)
    if recipe.quantile:
        clamped, residual = clamp_outliers(x.detach(), recipe.quantile)
        inputs = rounded(clamped) + residual.double()
    gradient = dy.double().T @ inputs
    if recipe.estimator:
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 6
        gradient *= estimator_slope(layer.weight.detach() / scale, recipe.estimator).double()
    torch.testing.assert_close(out.double(), inputs @ weight.T + layer.bias.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad.double(), dy.double() @ weight, rtol=1e-5, atol=1e-5)  # type: ignore[union-attr]
    torch.testing.assert_close(layer.weight.grad.double(), gradient, rtol=1e-4, atol=1e-4)  # type: ignore[union-attr]
    torch.testing.assert_close(layer.bias.grad, dy.sum(0))


def test_clamping_makes_the_error_of_outliers_smaller(noise: torch.Generator) -> None:
    x, errors = torch.randn(64, 128, generator=noise), []
    x[:, 7] *= 30
    for recipe in (DIRECT, Fp4Recipe()):
        layer = Fp4Linear(128, 32, bias=False, recipe=recipe)
        with torch.no_grad():
            layer.weight.copy_(torch.randint(-6, 7, (32, 128), generator=torch.Generator().manual_seed(1)))
            layer.weight[:, 0] = 6
            codes, scales = quantize_e2m1(layer.weight)
            errors.append((layer(x) - x @ (codes.float() * scales).T).norm())
    assert errors[1] < errors[0] / 2


def test_convert_takes_the_recipe() -> None:
    model = nn.ModuleDict({"up_proj": nn.Linear(32, 16), "lm_head": nn.Linear(32, 16)})
    assert convert(model, Fp4Recipe()).converted == ("up_proj",)
    assert isinstance(model["up_proj"], Fp4Linear)


def test_bad_input() -> None:
    with pytest.raises(
        ValueError, match=r"quantile: expected a number between 0.5 and 1, or None, found 1.0"
    ):
        Fp4Recipe(quantile=1.0)
    with pytest.raises(ValueError, match=r"estimator: expected k >= 1 or None, found 0.5"):
        Fp4Recipe(estimator=0.5)
    layer = Fp4Linear(16, 16, recipe=DIRECT)
    with pytest.raises(ValueError, match=r"input: expected \[..., 16\], found \[2, 8\]"):
        layer(torch.zeros(2, 8))
    with torch.no_grad():
        layer.weight[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match="weight: expected finite values"):
        layer(torch.zeros(2, 16))
