# SPDX-License-Identifier: Apache-2.0
"""Activations that are saved in FP8: what is saved, how near gradients are, and what stays as it is."""

import pytest
import torch
from torch import Tensor, nn

from vllm_fp8ext.trainer.activations import Fp8Activations, pack, unpack
from vllm_fp8ext.trainer.linear import BlockFp8Linear
from vllm_fp8ext.trainer.recipes import BlockScaling


class Gated(nn.Module):
    """A norm and a gated MLP, as Llama has them, and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(64)
        self.gate_proj, self.up_proj = (nn.Linear(64, 160, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(160, 64, bias=False)
        self.lm_head = nn.Linear(64, 40, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        hidden = nn.functional.silu(self.gate_proj(y)) * self.up_proj(y)
        return self.lm_head(x + self.down_proj(hidden))


@pytest.fixture
def model() -> Gated:
    torch.manual_seed(0)
    return Gated()


def nearest(values: Tensor, scale: Tensor) -> Tensor:
    """The nearest E4M3 value times the scale, by float64."""
    table = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).double()
    table = table[table.isfinite()]
    scaled = values.double() / scale.double()
    return table[(scaled[..., None] - table).abs().argmin(-1)] * scale.double()


@pytest.mark.parametrize("shape", [(7, 50), (2, 3, 160), (129,)])
def test_values_are_the_nearest_of_their_granularity(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = nearest(x, x.abs().amax() / 448)
    near = (unpack(pack(x, "tensor")) - expected).abs() <= expected.abs() * 1e-6
    assert near.double().mean() > 0.98
    scales = torch.stack([part.abs().amax(-1) / 448 for part in x.split(16, -1)], -1)
    expected = nearest(x, scales.repeat_interleave(16, -1)[..., : shape[-1]])
    near = (unpack(pack(x, "group")) - expected).abs() <= expected.abs() * 1e-6
    assert near.double().mean() > 0.98


def test_nan_stays() -> None:
    x = torch.ones(4, 32)
    x[1, 3] = torch.nan
    assert torch.isnan(unpack(pack(x, "tensor"))).all()
    assert torch.isnan(unpack(pack(x, "group"))).sum() == 16


def gradients(model: nn.Module, x: Tensor, fp8: bool) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    if fp8:
        with Fp8Activations(model):
            out = model(x)
    else:
        out = model(x)
    out.square().mean().backward()
    return out, {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def test_gradients_are_near_and_the_forward_pass_is_the_same(model: Gated) -> None:
    x = torch.randn(48, 64, generator=torch.Generator().manual_seed(1))
    out, rounded = gradients(model, x, fp8=True)
    expected, exact = gradients(model, x, fp8=False)
    assert torch.equal(out, expected)
    assert torch.equal(rounded["lm_head.weight"], exact["lm_head.weight"])
    for name, value in exact.items():
        error = (rounded[name] - value).norm() / value.norm()
        assert error < 0.04, name
        assert error > 0 or name == "lm_head.weight", name


def test_what_is_saved(model: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of linear layers with one scale, shared where they are; everything else in groups; the output layer as it is."""
    packed = []
    monkeypatch.setattr(
        "vllm_fp8ext.trainer.activations.pack",
        lambda values, granularity: (
            packed.append((granularity, tuple(values.shape))) or pack(values, granularity)
        ),
    )
    with Fp8Activations(model):
        model(torch.randn(48, 64))
    assert packed.count(("tensor", (48, 64))) == 1  # gate and up have one input
    assert packed.count(("tensor", (48, 160))) == 1
    assert ("group", (48, 160)) in packed
    assert {granularity for granularity, shape in packed if shape == (48, 40)} == set()
    packed.clear()
    with Fp8Activations(model, keep=("gate_proj", "up_proj", "down_proj", "lm_head")):
        model(torch.randn(48, 64))
    assert not [each for each in packed if each[0] == "tensor"]


def test_a_tensor_that_changed_is_saved_again(model: Gated) -> None:
    """The address alone does not say which tensor it is."""
    x = torch.randn(48, 64, requires_grad=True)
    y = x * 1
    with Fp8Activations(model):
        first = model.gate_proj(y).sum()
        y.detach().mul_(-1)
        y.add_(0)
        second = model.up_proj(y).sum()
    first.backward(retain_graph=True)
    second.backward()
    assert model.gate_proj.weight.grad is not None
    assert model.up_proj.weight.grad is not None
    torch.testing.assert_close(model.gate_proj.weight.grad, -model.up_proj.weight.grad)


def test_fp8_layers_keep_their_own_codes() -> None:
    torch.manual_seed(0)
    layer = BlockFp8Linear(128, 64, recipe=BlockScaling())
    x = torch.randn(1100, 128).requires_grad_()  # with more scales than are saved as they are
    with Fp8Activations(layer):
        out = layer(x)
    out.sum().backward()
    saved = layer.weight.grad
    layer.weight.grad = None
    layer(x).sum().backward()
    assert saved is not None
    assert torch.equal(saved, layer.weight.grad)  # type: ignore[arg-type]


def test_copies_of_weights_are_saved_as_they_are(model: Gated) -> None:
    """Autocast multiplies by a copy of the weight, which is no parameter."""
    x, dy = torch.randn(48, 64).requires_grad_(), torch.randn(48, 160)
    layer = model.gate_proj
    results = []
    for context in (Fp8Activations(layer), torch.enable_grad()):
        with torch.autocast("cpu", torch.bfloat16), context:
            out = layer(x)
        (result,) = torch.autograd.grad(out, x, dy.bfloat16())
        results.append(result)
    assert torch.equal(*results)


def test_misuse(model: Gated) -> None:
    with pytest.raises(ValueError, match="keep: expected names of modules, found nothing"):
        Fp8Activations(model, keep=("nothing",))
    context = Fp8Activations(model)
    with context, pytest.raises(RuntimeError, match="expected to be entered once"), context:
        pass
    with pytest.raises(ValueError, match="inside"), Fp8Activations(model):
        raise ValueError("inside")
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
