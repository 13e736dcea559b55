# SPDX-License-Identifier: Apache-2.0
"""FP8 layers of a trainer, held to the server's bits, to float64 products, and to the formulas of their recipes."""

import copy
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from vllm_fp8ext.kernels.gemm.linear import reference_linear
from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.trainer import block_product, tensor_linear
from vllm_fp8ext.trainer.block_product import multiply, quantize_blocks, quantize_rows, row_values
from vllm_fp8ext.trainer.convert import DECAYS, ENCODERS, Recipe, convert
from vllm_fp8ext.trainer.linear import BlockFp8Linear
from vllm_fp8ext.trainer.recipes import BlockScaling, CurrentScaling, DelayedScaling
from vllm_fp8ext.trainer.tensor_linear import TensorFp8Linear, scale_from
from vllm_fp8ext.update.contract.shard_slice import ShardSlice
from vllm_fp8ext.update.worker.digest import checkpoint_digests, digest


class Attention(nn.Module):
    """Layers with transformers' names, and rows that are no multiples of 128, so that blocks span q, k and v."""

    def __init__(self, rows: tuple[int, int, int] = (192, 96, 96), width: int = 256) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, each, bias=False) for each in rows)
        self.o_proj = nn.Linear(rows[0] + 64, width, bias=False)


class Model(nn.Module):
    """A layer and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()
        self.lm_head = nn.Linear(256, 128, bias=False)


@pytest.fixture
def noise() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def layer_of(
    recipe: BlockScaling, noise: torch.Generator, dtype: torch.dtype = torch.float32
) -> BlockFp8Linear:
    layer = BlockFp8Linear(256, 192, recipe=recipe, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(192, 256, generator=noise))
        assert layer.bias is not None
        layer.bias.copy_(torch.randn(192, generator=noise))
    return layer


def relative(value: Tensor, expected: Tensor) -> float:
    return float((value.detach().double() - expected.detach()).norm() / expected.detach().norm())


@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
@pytest.mark.parametrize("master", [torch.float32, torch.bfloat16])
def test_a_layer_multiplies_as_the_server_does(
    scale_format: reference.ScaleFormat, master: torch.dtype, noise: torch.Generator
) -> None:
    layer = layer_of(BlockScaling(scale_format=scale_format), noise, master)
    x = torch.randn(2, 5, 256, generator=noise).bfloat16()
    pushed = layer.weight.detach().bfloat16()
    served = reference.dequantize_weight(*reference.quantize_weight(pushed, scale_format))
    expected = reference_linear(x.view(10, 256), served, scale_format) + layer.bias.detach().bfloat16()
    assert torch.equal(layer(x).view(10, 192), expected)


def test_codes_are_those_that_the_server_serves(tmp_path: Path, noise: torch.Generator) -> None:
    """The digests of a checkpoint, which `fp8ext digest` and the server compute, are those of the layers' codes."""
    model = Model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=noise))
    saved = {f"model.layers.0.{name}": each.detach().bfloat16() for name, each in model.named_parameters()}
    save_file(saved, tmp_path / "model.safetensors")
    digests = checkpoint_digests(tmp_path)
    result = convert(model, BlockScaling())
    assert result.converted == tuple(f"self_attn.{name}_proj" for name in "qkvo")
    assert result.kept == {"lm_head": "an output layer"}
    for name in result.converted:
        weight = model.get_submodule(name).quantized_weight()  # type: ignore[operator]
        rows, columns = weight.codes.shape
        # rows of other layers ahead in the first block are no part of a digest
        ahead = torch.zeros(weight.offset, columns, dtype=weight.codes.dtype)
        piece = ShardSlice(
            0,
            name,
            (weight.offset + rows, columns),
            ((0, rows), (0, columns)),
            (weight.offset, 0),
            True,
            "bfloat16",
        )
        codes = torch.cat([ahead.view(torch.uint8), weight.codes.view(torch.uint8)]).view(weight.codes.dtype)
        assert digest(piece, codes, weight.scales) == digests[f"model.layers.0.{name}.weight"]["0"], name
    alone = quantize_blocks(model.self_attn.k_proj.weight.detach().bfloat16(), "fp32")
    fused = model.self_attn.k_proj.quantized_weight()  # type: ignore[operator]
    assert not torch.equal(alone.codes.view(torch.uint8), fused.codes.view(torch.uint8))


@pytest.mark.parametrize("backward", ["e4m3", "e5m2", "bf16"])
def test_gradients_are_products_of_what_was_quantized(backward: str, noise: torch.Generator) -> None:
    recipe = BlockScaling(backward=backward)  # type: ignore[arg-type]
    layer = layer_of(recipe, noise)
    x = torch.randn(70, 256, generator=noise).requires_grad_()
    dy = torch.randn(70, 192, generator=noise)
    layer(x).backward(dy)
    weight = layer.quantized_weight().values().double()
    inputs = row_values(quantize_rows(x.detach().bfloat16(), "fp32"))
    if backward == "bf16":
        dx, dw = dy.double() @ weight, dy.double().T @ inputs.double()
    else:
        dtype = torch.float8_e4m3fn if backward == "e4m3" else torch.float8_e5m2
        rows, transposed = (
            row_values(quantize_rows(each.contiguous(), "fp32", dtype)).double() for each in (dy, dy.T)
        )
        dx = rows @ weight
        dw = transposed @ quantize_blocks(inputs.T.contiguous(), "fp32").values().double().T
    assert relative(x.grad, dx) < 1e-6  # type: ignore[arg-type]
    assert relative(layer.weight.grad, dw) < 1e-6  # type: ignore[arg-type]
    assert relative(layer.bias.grad, dy.double().sum(0)) < 1e-6  # type: ignore[arg-type]
    # FP8 keeps 3 or 2 bits behind the point: gradients stay near those of the unquantized layer
    bound = {"bf16": 0.04, "e4m3": 0.06, "e5m2": 0.1}[backward]
    assert relative(x.grad, dy.double() @ layer.weight.double()) < bound  # type: ignore[arg-type]
    assert relative(layer.weight.grad, dy.double().T @ x.double()) < bound  # type: ignore[arg-type]


@pytest.mark.parametrize("backward", ["e4m3", "e5m2", "bf16"])
def test_gradients_of_no_tokens_are_zero(backward: Literal["e4m3", "e5m2", "bf16"]) -> None:
    """An expert may get none."""
    layer = BlockFp8Linear(130, 70, recipe=BlockScaling(backward=backward))
    x = torch.empty(2, 0, 130, requires_grad=True)
    layer(x).sum().backward()
    gradients = x.grad, layer.weight.grad, layer.bias.grad
    assert [(part.shape, part.any().item()) for part in gradients if part is not None] == [
        ((2, 0, 130), False),
        ((70, 130), False),
        ((70,), False),
    ]


def test_gradients_of_layers_that_share_blocks(noise: torch.Generator) -> None:
    model = Model()
    convert(model, BlockScaling())
    layer = model.self_attn.k_proj
    x, dy = torch.randn(9, 256, generator=noise).requires_grad_(), torch.randn(9, 96, generator=noise)
    layer(x).backward(dy)
    values = layer.quantized_weight()  # type: ignore[operator]
    assert values.offset == 64
    assert relative(x.grad, row_values(quantize_rows(dy, "fp32")).double() @ values.values().double()) < 1e-6  # type: ignore[arg-type]
    copied = copy.deepcopy(model).self_attn.k_proj
    assert torch.equal(copied(x), layer(x))


def test_layers_keep_one_byte_an_element(noise: torch.Generator) -> None:
    layer, sizes = layer_of(BlockScaling(), noise), []
    x = torch.randn(64, 256, generator=noise).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda each: sizes.append(each.nbytes) or each, lambda each: each
    ):
        layer(x)
    assert sum(sizes) <= (64 * 256 + 192 * 256) * (1 + 4 / 128)


def test_autocast_decides_the_dtype(noise: torch.Generator) -> None:
    layer, x = layer_of(BlockScaling(), noise), torch.randn(3, 256, generator=noise)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, layer(x.bfloat16()))


def test_e5m2_codes_are_the_nearest(noise: torch.Generator) -> None:
    x = torch.randn(3, 300, generator=noise) * torch.tensor([[1e-4], [1.0], [1e3]])
    codes, scales = quantize_rows(x, "fp32", torch.float8_e5m2)
    values = torch.arange(256).to(torch.uint8).view(torch.float8_e5m2).double()
    values = values[values.isfinite()]
    scaled = x.double() / scales.double().repeat_interleave(128, 1)[:, :300]
    nearest = (scaled[..., None] - values).abs().amin(-1)
    # quotients are rounded to fp32 first
    assert torch.all((scaled - codes.double()).abs() <= nearest + scaled.abs() * 2.0**-23)


@pytest.mark.parametrize("formats", ["hybrid", "e4m3"])
def test_current_scaling(formats: str, noise: torch.Generator) -> None:
    layer = TensorFp8Linear(48, 32, recipe=CurrentScaling(formats=formats, margin=1))  # type: ignore[arg-type]
    x, dy = torch.randn(7, 48, generator=noise).requires_grad_(), torch.randn(7, 32, generator=noise)
    layer(x).backward(dy)

    def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
        scale = torch.finfo(dtype).max / values.detach().abs().max() / 2
        return (values.detach() * scale).to(dtype).double() / scale.double()

    inputs, weight = rounded(x, torch.float8_e4m3fn), rounded(layer.weight, torch.float8_e4m3fn)
    gradient = rounded(dy, torch.float8_e5m2 if formats == "hybrid" else torch.float8_e4m3fn)
    assert relative(layer(x), inputs @ weight.T + layer.bias.double()) < 1e-6
    assert relative(x.grad, gradient @ weight) < 1e-6  # type: ignore[arg-type]
    assert relative(layer.weight.grad, gradient.T @ inputs) < 1e-6  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("algorithm", "factors"), [("max", (1, 4, 4, 4, 2)), ("most_recent", (1, 4, 2, 1, 2))]
)
def test_delayed_scaling_remembers(algorithm: str, factors: tuple[int, ...]) -> None:
    """The scale of each call is of the history before it, three calls long; the first is 1."""
    recipe = DelayedScaling(history=3, algorithm=algorithm)  # type: ignore[arg-type]
    layer = TensorFp8Linear(16, 16, recipe=recipe)
    for call, (amax, factor) in enumerate(zip((4.0, 2.0, 1.0, 2.0, 1.0), factors, strict=True)):
        codes, scale = layer.quantize(torch.full((2, 16), amax), 0, torch.float8_e4m3fn)
        assert scale == (448 / factor if call else 1)
        assert codes.float().max() == min(amax * scale, 448)
    restored = TensorFp8Linear(16, 16, recipe=recipe)
    restored.load_state_dict(layer.state_dict())
    assert restored.amax_history[0].tolist() == [1.0, 2.0, 1.0]
    restored.eval().quantize(torch.full((2, 16), 9.0), 0, torch.float8_e4m3fn)
    assert restored.amax_history[0].tolist() == [1.0, 2.0, 1.0]


def test_scales_of_no_magnitude_stay() -> None:
    amax = torch.tensor([0.0, torch.inf, torch.nan, 1e-40, 2.0])
    scales = scale_from(amax, torch.full((5,), 3.0), 448.0, 0)
    assert scales.tolist() == [3.0, 3.0, 3.0, torch.finfo(torch.float32).max, 224.0]


def test_kept_layers_are_the_servers() -> None:
    """Names and shapes, as the server's own rules judge them."""
    from vllm_fp8ext.layers import unquantized_layers

    assert unquantized_layers.ENCODERS == ENCODERS
    assert unquantized_layers.DECAYS == DECAYS
    for dtype in (torch.bfloat16, torch.float16):
        for rows in (32, 64, 96, 128, 192):
            for columns in (64, 128, 192):
                model = nn.ModuleDict({"o_proj": nn.Linear(columns, rows), "x": nn.Linear(128, 128)})
                kept = "o_proj" in convert(model, BlockScaling(served_dtype=dtype)).kept
                assert kept == (unquantized_layers.unfit(rows, columns, str(dtype)[6:]) is not None), (
                    rows,
                    columns,
                )


def test_convert_keeps_parameters_and_names() -> None:
    model = Model()
    before, state = dict(model.named_parameters()), model.state_dict()
    convert(model, BlockScaling(), ignore=("*.o_proj",))
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert model.state_dict().keys() == state.keys()
    assert type(model.self_attn.o_proj) is nn.Linear
    assert isinstance(model.self_attn.q_proj, BlockFp8Linear)


def test_convert_replaces_a_layer_wherever_it_is() -> None:
    model = nn.Sequential(nn.Linear(128, 128), nn.ReLU())
    model.append(model[0])
    assert convert(model, BlockScaling()).converted == ("0",)
    assert model[2] is model[0]
    assert isinstance(model[0], BlockFp8Linear)


@pytest.mark.parametrize("recipe", [CurrentScaling(), DelayedScaling()])
def test_convert_takes_recipes_of_tensors(recipe: Recipe) -> None:
    model = Model()
    assert len(convert(model, recipe, quantize=("lm_head",)).converted) == 5
    assert isinstance(model.lm_head, TensorFp8Linear)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"ignore": ("*.q_proj",)},
            r"expected all layers of one matrix of the server, found \['self_attn.q_proj'\] kept",
        ),
        ({"quantize": ("nothing",)}, "nothing: expected a pattern of linear layers' names, found none"),
        ({"ignore": ("*",)}, "model: expected linear layers to convert, found 5, all kept"),
    ],
)
def test_what_convert_refuses(arguments: dict[str, tuple[str, ...]], text: str) -> None:
    model = Model()
    with pytest.raises(ValueError, match=text):
        convert(model, BlockScaling(), **arguments)
    assert type(model.self_attn.k_proj) is nn.Linear


def test_a_recipe_on_a_layer_that_cannot_take_it() -> None:
    model = nn.ModuleDict({"a": nn.Linear(100, 64), "b": nn.Linear(128, 64)})
    with pytest.raises(
        ValueError, match="a: expected a layer for BlockScaling, found one of 64x100, not multiples"
    ):
        convert(model, BlockScaling(), quantize=("a",))
    assert convert(model, BlockScaling()).kept["a"].startswith("of 64x100")


def test_bad_input() -> None:
    layer = BlockFp8Linear(128, 64, recipe=BlockScaling())
    with pytest.raises(ValueError, match=r"input: expected \[..., 128\], found \[2, 64\]"):
        layer(torch.zeros(2, 64))
    with pytest.raises(ValueError, match=r"input: expected \[..., 16\], found \[2, 64\]"):
        TensorFp8Linear(16, 16, recipe=CurrentScaling())(torch.zeros(2, 64))
    with torch.no_grad():
        layer.weight[0, 0] = torch.nan
    with pytest.raises(reference.NonFiniteError, match="weight: expected finite values"):
        layer(torch.zeros(2, 128))
    with pytest.raises(ValueError, match="expected this one among them"):
        layer.fuse((nn.Linear(128, 64),))
    for wrong in (
        {"backward": "fp16"},
        {"scale_format": "ue8m0"},
        {"gemm": "cublas"},
        {"served_dtype": torch.float32},
    ):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}: expected .*, found"):
            BlockScaling(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="history: expected at least 1 call, found 0"):
        DelayedScaling(history=0)


def test_products_do_without_deep_gemm_only_if_allowed(noise: torch.Generator) -> None:
    x, weight = (torch.randn(3, 128, generator=noise) for _ in range(2))
    operands = quantize_rows(x, "fp32"), quantize_blocks(weight, "fp32")
    expected = reference.gemm(*operands[0], operands[1].codes, operands[1].scales)
    assert torch.equal(multiply(*operands, torch.float32), expected)


@pytest.mark.parametrize("formats", ["hybrid", "e4m3"])
def test_kernels_multiply_with_one_scale(
    formats: Any, noise: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="needs Triton, which the CPU build does not bring")
    layer = TensorFp8Linear(80, 48, recipe=CurrentScaling(formats=formats))
    x = torch.randn(35, 80, generator=noise, requires_grad=True)
    dy = torch.randn(35, 48, generator=noise)
    results = []
    for runs in (False, True):
        monkeypatch.setattr(tensor_linear, "runs_kernels", lambda operand, runs=runs: runs)
        out = layer(x)
        results.append((out, *torch.autograd.grad(out, (x, layer.weight, layer.bias), dy)))
    for found, wanted in zip(*results, strict=True):
        assert relative(found, wanted.double()) < 1e-6


@pytest.mark.parametrize("backward", ["e4m3", "e5m2", "bf16"])
@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
def test_kernels_compute_the_same_gradients(
    backward: Any, scale_format: Any, noise: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operands that Triton's kernels make are torch's bits; 130 tokens are no whole block."""
    pytest.importorskip("triton", reason="needs Triton, which the CPU build does not bring")
    layer = layer_of(BlockScaling(backward=backward, scale_format=scale_format), noise, torch.bfloat16)
    x = torch.randn(130, 256, generator=noise, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(130, 192, generator=noise, dtype=torch.bfloat16)
    expected = torch.autograd.grad(layer(x), (x, layer.weight, layer.bias), dy)
    monkeypatch.setattr(block_product, "runs_kernels", lambda operand: True)
    gradients = torch.autograd.grad(layer(x), (x, layer.weight, layer.bias), dy)
    for gradient, wanted in zip(gradients, expected, strict=True):
        assert relative(gradient, wanted.double()) < (1e-6 if backward == "bf16" else 4e-3), (
            "one rounding to BF16"
        )
