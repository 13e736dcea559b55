# SPDX-License-Identifier: Apache-2.0
"""COAT's optimizer, held to float64 references and to AdamW, and its kernel to its reference."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from vllm_fp8ext.trainer.group_moments import (
    GROUP,
    LOG2_RANGE,
    Moments,
    empty_moments,
    moment_values,
    quantize_moments,
)
from vllm_fp8ext.trainer.optimizer import AdamWStep, Fp8AdamW, reference_step
from vllm_fp8ext.trainer.recipes import FP8_DTYPES, Fp8Name

FORMATS: tuple[Fp8Name, ...] = ("e4m3", "e5m2")


@pytest.fixture
def noise() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def reference_values(values: Tensor, name: Fp8Name) -> Tensor:
    """Values through FP8 and back by float64, with the exponent that the paper's formula gives."""
    dtype = FP8_DTYPES[name]
    table = torch.arange(256).to(torch.uint8).view(dtype).double()
    table = table[table.isfinite()].abs().unique()
    largest, least = float(table[-1]), float(table[1])
    result = []
    for group in values.double().flatten().split(GROUP):
        amax, smallest = float(group.abs().max()), float(group[group != 0].abs().min())
        k = torch.tensor(math.log(largest / least) / math.log(amax / smallest)).bfloat16().double()
        scaled = largest * (group.abs() / amax) ** k
        codes = table[(scaled[:, None] - table).abs().argmin(1)]
        result.append(torch.sign(group) * amax * (codes / largest) ** (1 / k))
    return torch.cat(result).view(values.shape)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("spread", [0.5, 4.0, 16.0])
def test_values_are_those_of_the_formula(name: Fp8Name, spread: float, noise: torch.Generator) -> None:
    signs = torch.randn(7, 50, generator=noise)
    values = signs.sign() * torch.exp2(spread * torch.randn(7, 50, generator=noise) - 20)
    back, expected = moment_values(quantize_moments(values, name)), reference_values(values, name)
    # a power at the middle between two codes may go either way
    close = ((back.double() - expected) / expected).abs() < 1e-4
    assert close.double().mean() > 0.98
    assert torch.equal(back == 0, values == 0)


@pytest.mark.parametrize("name", FORMATS)
def test_a_group_fills_the_formats_range(name: Fp8Name) -> None:
    values = torch.exp2(torch.linspace(-30, 0, GROUP))
    moments = quantize_moments(values, name)
    limits = torch.finfo(FP8_DTYPES[name])
    assert moments.codes.float().max() == limits.max
    assert moments.codes.float().min() == limits.smallest_normal * limits.eps
    assert float(moments.exponents) == pytest.approx(LOG2_RANGE[name] / 30, rel=2**-8)
    assert moments.scales.tolist() == [1.0]


def test_expansion_makes_the_error_smaller(noise: torch.Generator) -> None:
    """Moments span a few binary orders, which leaves most of a format's codes unused; the paper's table 1."""
    values = torch.exp2(torch.randn(64, GROUP, generator=noise))
    errors = [
        float((moment_values(quantize_moments(values, "e4m3", expand=expand)) - values).square().mean())
        for expand in (False, True)
    ]
    assert errors[1] < errors[0] / 1.6


@pytest.mark.parametrize(
    "values", [torch.zeros(3, 50), torch.full((130,), -3.0), torch.tensor(2.0), torch.zeros(0)]
)
def test_groups_without_a_range_are_exact(values: Tensor) -> None:
    moments = quantize_moments(values, "e4m3")
    torch.testing.assert_close(moment_values(moments), values, rtol=1e-6, atol=0)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_what_is_not_finite_is_not_hidden(wrong: float) -> None:
    values = torch.ones(200)
    values[3] = wrong
    moments = quantize_moments(values, "e4m3")
    assert not torch.isfinite(moments.scales[0])
    assert torch.isnan(moment_values(moments)[3])
    assert moment_values(moments)[199] == 1


def adamw_float64(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, numbers: AdamWStep
) -> tuple[Tensor, Tensor, Tensor]:
    p, g, m, v = (each.double() for each in (p, g, m, v))
    m = numbers.beta1 * m + (1 - numbers.beta1) * g
    v = numbers.beta2 * v + (1 - numbers.beta2) * g * g
    root = (v / (1 - numbers.beta2**numbers.step)).sqrt() + numbers.epsilon
    p = p * (1 - numbers.rate * numbers.decay) - numbers.rate * m / (1 - numbers.beta1**numbers.step) / root
    return p, m, v


def case(
    noise: torch.Generator, dtype: torch.dtype, second: Fp8Name
) -> tuple[Tensor, Tensor, Moments, Moments]:
    p, g, m, v = (torch.randn(5, 300, generator=noise) for _ in range(4))
    g *= 1e-3
    return (
        p.to(dtype),
        g.to(dtype),
        quantize_moments(m * 1e-3, "e4m3"),
        quantize_moments(v.square() * 1e-6, second),
    )


@pytest.mark.parametrize("second", FORMATS)
def test_a_step_is_adamws(second: Fp8Name, noise: torch.Generator) -> None:
    p, g, m, v = case(noise, torch.float32, second)
    numbers = AdamWStep(1e-2, 0.9, 0.999, 1e-8, 0.1, 7, True)
    expected, new_m, new_v = adamw_float64(p, g, moment_values(m), moment_values(v), numbers)
    reference_step(p, g, m, v, numbers)
    torch.testing.assert_close(p.double(), expected, rtol=1e-6, atol=1e-7)
    for moments, values, name in ((m, new_m, "e4m3"), (v, new_v, second)):
        direct = quantize_moments(values.float(), name)  # type: ignore[arg-type]
        assert (moments.codes.view(torch.uint8) == direct.codes.view(torch.uint8)).double().mean() > 0.99


@pytest.mark.parametrize("expand", [True, False])
@pytest.mark.parametrize("second", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_is_the_reference(
    dtype: torch.dtype, second: Fp8Name, expand: bool, noise: torch.Generator
) -> None:
    pytest.importorskip("triton", reason="needs Triton, which the CPU build does not bring")
    from vllm_fp8ext.trainer.adamw_triton import adamw_step

    device = "cuda" if torch.cuda.is_available() else "cpu"
    p, g, m, v = case(noise, dtype, second)
    g[0, :128] = 0  # a group without a gradient
    numbers = AdamWStep(1e-2, 0.9, 0.999, 1e-8, 0.1, 7, expand)
    first, other = (Moments(*(each.clone().to(device) for each in moments)) for moments in (m, v))
    stepped = p.clone().to(device)
    adamw_step(stepped, g.to(device), first, other, numbers)
    reference_step(p, g, m, v, numbers)
    tolerance = 2.0**-7 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(stepped.cpu(), p, rtol=tolerance, atol=1e-6)
    for kernel, expected in ((first, m), (other, v)):
        difference = kernel.codes.cpu().view(torch.uint8).int() - expected.codes.view(torch.uint8).int()
        assert difference.abs().max() <= 1
        assert (difference != 0).double().mean() < 0.01
        torch.testing.assert_close(kernel.scales.cpu(), expected.scales, rtol=1e-5, atol=0)
        torch.testing.assert_close(kernel.exponents.cpu(), expected.exponents, rtol=2.0**-7, atol=0)


def train(optimizer: str, steps: int = 40) -> list[float]:
    """Losses of a small regression, in which both optimizers see the same data."""
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 8))
    target = torch.randn(32, 8, generator=generator)
    kinds = {"fp32": torch.optim.AdamW, "fp8": Fp8AdamW}
    chosen = kinds[optimizer](model.parameters(), lr=5e-3)
    losses = []
    for _ in range(steps):
        x = torch.randn(64, 32, generator=generator)
        loss = (model(x) - torch.tanh(x @ target)).square().mean()
        chosen.zero_grad()
        loss.backward()
        chosen.step()
        losses.append(loss.item())
    return losses


def test_training_is_near_that_with_fp32_moments() -> None:
    losses, expected = train("fp8"), train("fp32")
    assert losses[-1] < losses[0] / 1.5
    assert sum(losses[-10:]) == pytest.approx(sum(expected[-10:]), rel=0.03)


def stepped(dtype: torch.dtype, **settings: object) -> tuple[nn.Linear, Fp8AdamW]:
    torch.manual_seed(0)
    layer = nn.Linear(40, 30, dtype=dtype)
    optimizer = Fp8AdamW(layer.parameters(), **settings)  # type: ignore[arg-type]
    for _ in range(3):
        layer(torch.randn(8, 40, dtype=dtype)).square().mean().backward()
        optimizer.step()
    return layer, optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_come_back_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    layer, optimizer = stepped(dtype, formats=("e4m3", "e5m2"))
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    other = Fp8AdamW(layer.parameters(), formats=("e4m3", "e5m2"))
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    for parameter in layer.parameters():
        assert other.state[parameter].keys() == optimizer.state[parameter].keys()
        for name, value in optimizer.state[parameter].items():
            loaded = other.state[parameter][name]
            assert loaded.dtype == value.dtype
            assert torch.equal(loaded.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), (
                name
            )


def test_states_take_a_quarter() -> None:
    parameter = nn.Parameter(torch.zeros(64, 256))
    moments = [empty_moments(parameter, name) for name in FORMATS]
    total = sum(each.nbytes for part in moments for each in part)
    assert 8 * parameter.numel() / total >= 3.75


def test_states_of_another_form_are_refused() -> None:
    layer, optimizer = stepped(torch.float32)
    state = optimizer.state_dict()
    before = {name: value.clone() for name, value in optimizer.state[layer.weight].items()}
    state["param_groups"][0]["group"] = 64
    with pytest.raises(ValueError, match=r"param_groups\[0\]: expected moments in groups of 128, found 64"):
        optimizer.load_state_dict(state)
    with pytest.raises(ValueError, match="expected moments in groups of 128, found none"):
        optimizer.load_state_dict(torch.optim.AdamW(layer.parameters()).state_dict())
    state = optimizer.state_dict()
    state["state"][0] = {**state["state"][0], "exp_avg_scale": torch.zeros(3)}
    state["state"][1] = {**state["state"][1], "exp_avg": torch.zeros(30)}
    with pytest.raises(
        ValueError, match=r"(?s)expected 10 groups of 128, found 3.*found torch.float32 \[30\]"
    ):
        optimizer.load_state_dict(state)
    assert all(
        torch.equal(optimizer.state[layer.weight][name], value)
        for name, value in before.items()
        if name == "step"
    )


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"lr": -1.0}, "expected lr >= 0"),
        ({"betas": (1.0, 0.9)}, r"betas: expected numbers in \[0, 1\)"),
        ({"formats": ("e4m3", "fp4")}, "formats: expected 'e4m3' or 'e5m2', found 'fp4'"),
    ],
)
def test_bad_settings(settings: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Fp8AdamW([nn.Parameter(torch.zeros(3))], **settings)  # type: ignore[arg-type]


def test_shards_of_fsdp2_keep_their_states(tmp_path: Path) -> None:
    """One process, one shard: codes are DTensors as their parameter is, and steps are those without FSDP."""
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        plain, sharded = nn.Linear(40, 30), nn.Linear(40, 30)
        sharded.load_state_dict(plain.state_dict())
        fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
        optimizers = [Fp8AdamW(each.parameters(), lr=0.1) for each in (plain, sharded)]
        x = torch.randn(8, 40)
        for _ in range(2):
            for model, optimizer in zip((plain, sharded), optimizers, strict=True):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert isinstance(sharded.weight, DTensor)
        torch.testing.assert_close(sharded.weight.full_tensor(), plain.weight)
        codes = optimizers[1].state[sharded.weight]["exp_avg"]
        assert isinstance(codes, DTensor)
        assert codes.placements == sharded.weight.placements
        loaded = Fp8AdamW(sharded.parameters(), lr=0.1)
        loaded.load_state_dict(optimizers[1].state_dict())
        assert isinstance(loaded.state[sharded.weight]["exp_avg"], DTensor)
    finally:
        destroy_process_group()
