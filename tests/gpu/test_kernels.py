# SPDX-License-Identifier: Apache-2.0
"""Kernels on a Hopper GPU against the reference. `tests/kernels` has the quantizers' edge cases, on the GPU where there is
one."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_fp8ext.kernels.gemm import decode_gemm, decode_gemm_configs
from vllm_fp8ext.kernels.gemm.decode_gemm_configs import TileConfig
from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.numerics.reference import BLOCK, ScaleFormat, blocks
from vllm_fp8ext.kernels.testing import hard_cases, kernel_cases

pytestmark = pytest.mark.gpu

FORMATS = ("fp32", "pow2")
SHAPES = ((64, 4096), (3, 200), (7, 5120), (3, 18944), (2051, 5000))
"""Of activations: of the last, programs take several tokens."""


def config_id(config: TileConfig) -> str:
    return f"{config.rows}x{config.splits}"


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("shape", kernel_cases.LINEAR.values(), ids=list(kernel_cases.LINEAR))
def test_a_models_weights_are_quantized_as_the_reference_does(
    shape: tuple[int, int], scale_format: ScaleFormat
) -> None:
    from vllm_fp8ext.kernels.quantize.quantize_weight import empty_like, quantize_weight

    weight = kernel_cases.weight(*shape, "cuda")
    codes, scales = empty_like(weight)
    error, norm = quantize_weight(weight, codes, scales, scale_format)
    expected = reference.quantize_weight(weight.cpu(), scale_format)
    assert kernel_cases.same(codes, expected[0])
    assert kernel_cases.same(scales, expected[1])
    lost = reference.dequantize_weight(codes, scales).double() - weight.double()
    assert error == pytest.approx(float(lost.square().sum()), rel=1e-3)
    assert norm == pytest.approx(float(weight.double().square().sum()), rel=1e-3)


@pytest.mark.parametrize("scale_format", FORMATS)
def test_a_models_weights_are_quantized_together_as_the_reference_does(scale_format: ScaleFormat) -> None:
    from vllm_fp8ext.kernels.quantize.quantize_weight import empty_like
    from vllm_fp8ext.kernels.quantize.quantize_weights_batched import Destination, QuantizeBatched

    weights = [kernel_cases.weight(*shape, "cuda") for shape in (*kernel_cases.LINEAR.values(), (304, 208))]
    for part in (weights[:-1], weights):  # whole blocks, and others
        places = [Destination(*empty_like(weight), weight.stride(0)) for weight in part]
        addresses = torch.tensor([weight.data_ptr() for weight in part])
        sums = QuantizeBatched(places, part[0].dtype, scale_format).queue(addresses).tolist()
        for weight, place, (error, norm, wrong) in zip(part, places, sums, strict=True):
            expected = reference.quantize_weight(weight.cpu(), scale_format)
            assert kernel_cases.same(place.codes_NK, expected[0])
            assert kernel_cases.same(place.scales_NbKb, expected[1])
            lost = reference.dequantize_weight(place.codes_NK, place.scales_NbKb).double() - weight.double()
            assert error == pytest.approx(float(lost.square().sum()), rel=1e-3)
            assert norm == pytest.approx(float(weight.double().square().sum()), rel=1e-3)
            assert not wrong


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1), (129, 1), (2, 1), (1, 2), (129, 129), (257, 16)], ids=str)
def test_sums_of_blocks_of_few_values(
    shape: tuple[int, int], dtype: torch.dtype, scale_format: ScaleFormat
) -> None:
    from vllm_fp8ext.kernels.quantize.quantize_weight import empty_like, quantize_weight

    for value in (0.0, 0.3, -3.0):
        weight = torch.full(shape, value, dtype=dtype, device="cuda")
        codes, scales = empty_like(weight)
        error, norm = quantize_weight(weight, codes, scales, scale_format)
        lost = reference.dequantize_weight(codes, scales).double() - weight.double()
        assert error == pytest.approx(float(lost.square().sum()), rel=1e-3, abs=1e-13 * norm)
        assert norm == pytest.approx(float(weight.double().square().sum()), rel=1e-3)


@pytest.mark.parametrize("scale_format", FORMATS)
def test_a_models_codes_are_copied_together(scale_format: ScaleFormat) -> None:
    from vllm_fp8ext.kernels.memory.copy_blocks import CopyBlocks
    from vllm_fp8ext.kernels.quantize.quantize_weight import empty_like, quantize_weight
    from vllm_fp8ext.kernels.quantize.quantize_weights_batched import Destination

    weights = [kernel_cases.weight(*shape, "cuda") for shape in (*kernel_cases.LINEAR.values(), (304, 208))]
    sent = [empty_like(weight) for weight in weights]
    for weight, (codes, scales) in zip(weights, sent, strict=True):
        quantize_weight(weight, codes, scales, scale_format)
    sent[1][1][2, 3] = 0.0
    places = [Destination(*empty_like(weight), weight.stride(0)) for weight in weights]
    addresses = torch.tensor([[codes.data_ptr(), scales.data_ptr()] for codes, scales in sent])
    for count in (len(sent) - 1, len(sent)):  # whole blocks, and others
        copied = CopyBlocks(places[:count], [scales.stride(0) for _, scales in sent[:count]], scale_format)
        wrong = copied.queue(addresses[:count]).tolist()
        assert wrong == [[0.0, float(index == 1)] for index in range(count)]
    for (codes, scales), place in zip(sent, places, strict=True):
        assert kernel_cases.same(place.codes_NK, codes)
        assert kernel_cases.same(place.scales_NbKb, scales)


def test_an_embedding_is_copied_with_norms_in_one_launch() -> None:
    from vllm_fp8ext.kernels.memory.copy_batched import CopyBatched

    values = [torch.randn(*shape, device="cuda").bfloat16() for shape in ((151936, 512), (128,), (4096,))]
    places = [torch.zeros_like(value) for value in values]
    values[2][7] = float("inf")
    wrong = CopyBatched(places).queue(torch.tensor([value.data_ptr() for value in values]))
    assert wrong.tolist() == [0.0, 0.0, 1.0]
    assert all(torch.equal(place, value) for place, value in zip(places, values, strict=True))


@pytest.mark.parametrize(("dtype", "steps"), [(torch.bfloat16, 128), (torch.float16, 2048)])
@pytest.mark.parametrize("exponent", range(-13, 0))
def test_codes_of_every_pair_of_mantissas(dtype: torch.dtype, steps: int, exponent: int) -> None:
    """Each token has one largest value, in every group, and all values of a smaller power of two."""
    from vllm_fp8ext.kernels.quantize.quantize_activation import quantize_activation

    mantissas = 1 + torch.arange(steps, device="cuda") / steps
    groups = -(-steps // (BLOCK - 1))
    smaller = torch.zeros(groups * (BLOCK - 1), device="cuda")
    smaller[:steps] = mantissas * 2.0**exponent
    rest = smaller.view(1, groups, BLOCK - 1).expand(steps, -1, -1)
    x = torch.cat((mantissas[:, None, None].expand(-1, groups, 1), rest), 2).flatten(1).to(dtype)
    actual, expected = quantize_activation(x, "fp32"), reference.quantize_activation(x.cpu(), "fp32")
    assert kernel_cases.same(actual[0], expected[0])
    assert kernel_cases.same(actual[1], expected[1])


def _assert_nearly(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Sums in another order and another exponential move a rounding to BF16 here and there, nothing more; a group whose
    largest value is moved has another scale in each of its values."""
    for index in (0, *range(2, len(actual))):
        different = actual[index].contiguous().view(torch.uint8) != expected[index].view(torch.uint8)
        assert float(different.float().mean()) < 2e-3
    values, wanted = (reference.dequantize_activation(*parts[:2]) for parts in (actual, expected))
    assert float((values - wanted).norm() / wanted.norm()) < 2e-3


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("small_m", [False, True])
@pytest.mark.parametrize("adds_one", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fused_norm_of_activations(
    shape: tuple[int, int], adds_one: bool, small_m: bool, scale_format: ScaleFormat
) -> None:
    from vllm_fp8ext.kernels.quantize.rmsnorm_quantize import rmsnorm_quantize, rmsnorm_quantize_reference

    noise = torch.Generator("cuda").manual_seed(3)
    x, residual = kernel_cases.activations(*shape, "cuda"), kernel_cases.activations(*shape, "cuda", 5)
    scaling = torch.rand(shape[1], generator=noise, device="cuda").bfloat16() + 0.5
    quantized, added = rmsnorm_quantize(
        x, residual, scaling, 1e-6, scale_format, small_m=small_m, adds_one=adds_one
    )
    _assert_nearly(
        (*quantized, added),
        rmsnorm_quantize_reference(x, residual, scaling, 1e-6, scale_format, adds_one=adds_one),
    )


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gated_activations(shape: tuple[int, int], activation: Any, scale_format: ScaleFormat) -> None:
    from vllm_fp8ext.kernels.quantize.gated_quantize import gated_quantize, gated_quantize_reference

    gate_up = kernel_cases.activations(shape[0], 2 * shape[1], "cuda") / 8
    _assert_nearly(
        gated_quantize(gate_up, activation, scale_format),
        gated_quantize_reference(gate_up, activation, scale_format),
    )


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        pytest.param(config, shape, id=f"{config_id(config)}-{shape}")
        for config in kernel_cases.TILE_CONFIGS
        for shape in kernel_cases.DECODE_SHAPES
        if config.fits(decode_gemm_configs.width(shape[0]), shape[2])
    ],
)
def test_decode_gemm_stays_within_the_bound_and_repeats(
    config: TileConfig, shape: tuple[int, int, int, bool]
) -> None:
    from vllm_fp8ext.kernels.quantize.quantize_activation import quantize_activation

    m, n, k, biased = shape
    scale_format: ScaleFormat = "pow2" if m % 2 else "fp32"
    x = kernel_cases.activations(m, k, "cuda")
    codes, scales = reference.quantize_weight(kernel_cases.weight(n, k, "cuda"), scale_format)
    noise = torch.Generator("cuda").manual_seed(4)
    bias = torch.randn(n, generator=noise, device="cuda").bfloat16() if biased else None
    outs = [decode_gemm.decode_gemm(x, codes, scales, bias, scale_format, config) for _ in range(4)]
    expected = reference.quantize_activation(x, scale_format)
    assert kernel_cases.gemm_error(outs[0], *expected, codes, scales, bias) < 1
    assert all(kernel_cases.same(outs[0], out) for out in outs[1:])
    before = quantize_activation(x, scale_format)
    for stream in (False, True):
        config = dataclasses.replace(config, stream=stream)
        assert kernel_cases.same(
            outs[0], decode_gemm.decode_gemm(before, codes, scales, bias, scale_format, config)
        )


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_of_activations(shape: tuple[int, int], scale_format: ScaleFormat) -> None:
    from vllm_fp8ext.kernels.quantize.quantize_activation import quantize_activation

    x = kernel_cases.activations(*shape, "cuda")
    actual, expected = (
        quantize_activation(x, scale_format),
        reference.quantize_activation(x.cpu(), scale_format),
    )
    assert all(kernel_cases.same(*parts) for parts in zip(actual, expected, strict=True))


@pytest.mark.parametrize("kind", hard_cases.GEMM_KINDS)
@pytest.mark.parametrize("m", kernel_cases.DECODE_TOKENS)
@pytest.mark.parametrize("name", kernel_cases.LINEAR)
def test_decode_gemm_as_it_is_chosen_for_a_model(name: str, m: int, kind: str) -> None:
    n, k = kernel_cases.LINEAR[name]
    x, weight = hard_cases.gemm_inputs(m, n, k, kind, "cuda")
    codes, scales = reference.quantize_weight(weight)
    out = decode_gemm.decode_gemm(x, codes, scales, None, "fp32")
    assert kernel_cases.gemm_error(out, *reference.quantize_activation(x), codes, scales) < 1


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize(("m", "splits"), [(1, 1), (7, 2), (33, 4), (64, 1), (100, 8)])
def test_decode_gemm_quantizes_as_the_reference_does(m: int, splits: int, scale_format: ScaleFormat) -> None:
    """A weight that is one on the diagonal gives the activations back, dequantized and rounded to BF16. For one token a
    bias takes that away again, and what comes is what the rounding cut."""
    k = 1040
    x = hard_cases.awkward(m, k, "normal", torch.float32, m)
    x *= torch.exp(2 * hard_cases.awkward(m, k, "normal", torch.float32, m + 1))
    x[-1, :BLOCK] = 0
    x[-1, BLOCK : 2 * BLOCK] *= 2.0**-40
    here = x.bfloat16().cuda()
    codes = torch.eye(k, device="cuda").to(reference.FP8_DTYPE)
    scales = torch.ones(blocks(k), blocks(k), device="cuda")
    config = TileConfig(rows=128, splits=splits)
    out = decode_gemm.decode_gemm(here, codes, scales, None, scale_format, config)
    expected = reference.quantize_activation(here.cpu(), scale_format)
    exact = reference.dequantize_activation(*expected).cuda()
    assert torch.equal(out, exact.bfloat16())
    if m == 1:
        rest = decode_gemm.decode_gemm(here, codes, scales, -out[0], scale_format, config)
        assert torch.equal(rest, (exact - out.float()).bfloat16())


@pytest.mark.parametrize("kind", hard_cases.GEMM_KINDS)
@pytest.mark.parametrize(
    ("shape", "splits"), [((1, 4096, 4096), 4), ((33, 200, 1040), 2), ((64, 4096, 12288), 1)]
)
def test_triton_gemm_stays_within_the_bound(shape: tuple[int, int, int], splits: int, kind: str) -> None:
    from vllm_fp8ext.kernels.gemm import decode_gemm_triton

    m, n, k = shape
    x, weight = hard_cases.gemm_inputs(m, n, k, kind, "cuda")
    codes, scales = reference.quantize_weight(weight)
    config = decode_gemm_triton.TritonTileConfig(splits=splits)
    out = decode_gemm_triton.decode_gemm_triton(x, codes, scales, None, "fp32", config)
    assert kernel_cases.gemm_error(out, *reference.quantize_activation(x), codes, scales) < 1
