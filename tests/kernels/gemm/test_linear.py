# SPDX-License-Identifier: Apache-2.0
"""The reference linear operator against float64, and the contract that compilers hold it to."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from vllm_fp8ext.kernels.gemm import linear
from vllm_fp8ext.kernels.gemm.linear import reference_linear
from vllm_fp8ext.kernels.gemm.registry import GemmKernel
from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.numerics.quantized import Quantized
from vllm_fp8ext.kernels.numerics.reference import ScaleFormat

SIZES = st.one_of(st.integers(1, 9), st.sampled_from((127, 128, 129, 256)), st.integers(1, 300))
ROUND_OFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def operands(
    m: int, n: int, k: int, seed: int, dtype: torch.dtype, scale_format: ScaleFormat
) -> tuple[Tensor, ...]:
    """An activation, and codes and scales of a weight."""
    noise = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(m, k, generator=noise), torch.randn(n, k, generator=noise) * 0.1
    return x.to(dtype), *reference.quantize_weight(weight, scale_format)


@given(
    st.integers(1, 20),
    SIZES,
    SIZES,
    st.integers(0, 2**32 - 1),
    st.sampled_from(tuple(ROUND_OFF)),
    st.sampled_from(("fp32", "pow2")),
    st.sampled_from((1, 700, 1 << 24)),
)
@settings(max_examples=50)
def test_linear_is_the_reference_gemm_rounded_once(
    m: int, n: int, k: int, seed: int, dtype: torch.dtype, scale_format: ScaleFormat, slice_elements: int
) -> None:
    """Within the bound of an fp32 GEMM, plus half a step of the output's dtype (2^-25 below FP16's normal
    numbers)."""
    x, codes, scales = operands(m, n, k, seed, dtype, scale_format)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "_LARGEST_SLICE", slice_elements)
        out = reference_linear(x, reference.dequantize_weight(codes, scales), scale_format)
    assert (out.shape, out.dtype) == ((m, n), dtype)
    every = *reference.quantize_activation(x, scale_format), codes, scales
    exact = (
        reference.dequantize_activation(*every[:2]).double()
        @ reference.dequantize_weight(*every[2:]).double().T
    )
    bound = reference.gemm_error_bound(*every)
    rounding = (exact.abs() + bound) * ROUND_OFF[dtype] + 2.0**-25
    assert ((out.double() - exact).abs() <= bound + rounding).all()


def test_slices_cover_every_row_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x, codes, scales = operands(11, 40, 130, 3, torch.bfloat16, "fp32")
    rows = []
    whole = reference.quantize_activation

    def spy(x_MK: Tensor, scale_format: ScaleFormat) -> tuple[Tensor, Tensor]:
        rows.append(x_MK.shape[0])
        return whole(x_MK, scale_format)

    monkeypatch.setattr(reference, "quantize_activation", spy)
    monkeypatch.setattr(linear, "_LARGEST_SLICE", 4 * 130)
    reference_linear(x, reference.dequantize_weight(codes, scales), "fp32")
    assert rows == [4, 4, 3]


def test_no_tokens_make_no_output() -> None:
    out = reference_linear(torch.empty(0, 130, dtype=torch.bfloat16), torch.ones(7, 130), "fp32")
    assert (out.shape, out.dtype) == ((0, 7), torch.bfloat16)


@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
@pytest.mark.parametrize("dtype", list(ROUND_OFF))
def test_the_operator_keeps_its_contract(dtype: torch.dtype, scale_format: ScaleFormat) -> None:
    """Schema, fake implementation and tracing agree with what the operator does."""
    x, codes, scales = operands(3, 20, 130, 4, dtype, scale_format)
    torch.library.opcheck(reference_linear, (x, reference.dequantize_weight(codes, scales), scale_format))


@pytest.mark.parametrize("tokens", [1, 4, 7])
def test_room_is_laid_out_as_it_is_announced(tokens: int) -> None:
    x = torch.empty(tokens, 3)
    result = linear.quantized_room(x, 300)
    with FakeTensorMode() as mode:
        announced = linear.quantized_room(mode.from_tensor(x), 300)
    for part, told in zip(result, announced, strict=True):
        assert (part.shape, part.stride(), part.dtype) == (told.shape, told.stride(), told.dtype)


def test_activations_that_are_quantized_already(monkeypatch: pytest.MonkeyPatch) -> None:
    def multiply(x: Quantized, codes_NK: Tensor, scales_NbKb: Tensor, dtype: torch.dtype) -> Tensor:
        return reference.gemm(*x, codes_NK, scales_NbKb).to(dtype)

    monkeypatch.setitem(linear.GEMM_KERNELS, "slow", GemmKernel(name="slow", run=multiply))
    x, codes, scales = operands(5, 40, 256, 3, torch.bfloat16, "fp32")
    quantized, bias = reference.quantize_activation(x), torch.randn(40).bfloat16()
    out = linear.quantized_linear(*quantized, codes, scales, bias, 0, "slow")
    assert torch.equal(out, multiply(Quantized(*quantized), codes, scales, torch.bfloat16) + bias)
    with FakeTensorMode() as mode:
        told = linear.quantized_linear(*map(mode.from_tensor, (*quantized, codes, scales, bias)), 0, "slow")
    assert (told.shape, told.stride(), told.dtype) == (out.shape, out.stride(), out.dtype)


def test_an_unknown_scale_format_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 'fp32' or 'pow2', found 'e8m0'"):
        reference_linear(torch.ones(1, 2, dtype=torch.bfloat16), torch.ones(2, 2), "e8m0")


OPERATORS: dict[str, Callable[..., Tensor]] = {
    "linear": linear.linear,
    "rmsnorm_linear": lambda x, *rest: linear.rmsnorm_linear(
        x, None, torch.ones(130).bfloat16(), 1e-6, *rest
    )[0],
    "residual": lambda x, *rest: torch.cat(
        linear.rmsnorm_linear(torch.ones(40, 130).bfloat16(), x, torch.ones(130).bfloat16(), 1e-6, *rest), 1
    ),
    "gated_linear": lambda x, *rest: linear.gated_linear(torch.cat([x.T, x.T]).T, "silu", *rest),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_tokens_that_do_not_lie_in_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the operator hands on to kernels does."""
    pytest.importorskip("triton", reason="needs Triton, which the CPU build does not bring")

    def multiply(x: Quantized, codes_NK: Tensor, scales_NbKb: Tensor, dtype: torch.dtype) -> Tensor:
        return reference.dequantize_activation(x.codes, x.scales).to(dtype)

    monkeypatch.setitem(linear.GEMM_KERNELS, "noted", GemmKernel(name="noted", run=multiply))
    x, codes, scales = operands(40, 7, 130, 3, torch.bfloat16, "fp32")
    turned = x.T.contiguous().T
    assert turned.stride(1) != 1
    plain, other = (OPERATORS[name](given, codes, scales, None, "fp32", 0, "noted") for given in (x, turned))
    assert torch.equal(plain, other)


WIDER: dict[str, Callable[..., Any]] = {
    "linear": linear.linear,
    "rmsnorm_linear": lambda x, *rest: linear.rmsnorm_linear(x, x, torch.ones(208).bfloat16(), 1e-6, *rest)[
        0
    ],
    "gated_linear": lambda x, *rest: linear.gated_linear(torch.cat([x, x], 1), "silu", *rest),
}


@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
@pytest.mark.parametrize("name", WIDER)
def test_zeros_behind_the_columns_of_a_weight(
    name: str, scale_format: ScaleFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels get activations as wide as the weight, with zeros likewise; codes and scales are those without."""
    pytest.importorskip("triton", reason="needs Triton, which the CPU build does not bring")
    seen: list[Quantized] = []

    def multiply(x: Quantized, codes_NK: Tensor, scales_NbKb: Tensor, dtype: torch.dtype) -> Tensor:
        seen.append(x)
        return reference.gemm(*x, codes_NK, scales_NbKb).to(dtype)

    monkeypatch.setitem(linear.GEMM_KERNELS, "noted", GemmKernel(name="noted", run=multiply))
    x, codes, scales = operands(3, 64, 208, 3, torch.bfloat16, scale_format)
    wide = torch.zeros(64, 256, dtype=codes.dtype)
    wide[:, :208] = codes
    with_zeros, without = (
        WIDER[name](x, part, scales, None, scale_format, 0, "noted") for part in (wide, codes)
    )
    assert torch.equal(with_zeros, without)
    padded, plain = (part.codes.view(torch.uint8) for part in seen)
    assert (padded.shape, plain.shape) == ((3, 256), (3, 208))
    assert torch.equal(padded[:, :208], plain)
    assert not padded[:, 208:].any()
    assert torch.equal(seen[0].scales, seen[1].scales)


def test_few_tokens_read_a_weight_without_the_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """`decode_gemm` quantizes rows of activations as they are."""
    seen: list[Tensor] = []

    def noted(x: Tensor, codes: Tensor, *_: Any) -> Tensor:
        seen.append(codes)
        return x.new_empty(len(x), len(codes))

    monkeypatch.setattr(linear.decode_gemm, "decode_gemm", noted)
    x, codes, scales = operands(2, 5, 208, 3, torch.bfloat16, "fp32")
    wide = torch.zeros(5, 256, dtype=codes.dtype)
    linear.linear(x, wide, scales, None, "fp32", 16, "none")
    assert (seen[0].shape, seen[0].stride()) == ((5, 208), (256, 1))


def test_one_token_that_begins_anywhere_is_copied_to_where_the_kernel_takes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To torch a single row is contiguous wherever it begins, and whatever lies between rows."""
    seen: list[Tensor] = []

    def noted(x: Tensor, codes: Tensor, *_: Any) -> Tensor:
        seen.append(x)
        return x.new_empty(len(x), len(codes))

    monkeypatch.setattr(linear.decode_gemm, "decode_gemm", noted)
    _, codes, scales = operands(3, 5, 256, 3, torch.bfloat16, "fp32")
    wide = torch.randn(4, 1004).bfloat16()
    for x in (wide[:1, 4:260], wide[:1, :256], wide[:2, 4:260], torch.zeros(256, 1).bfloat16().t()):
        linear.linear(x, codes, scales, None, "fp32", 16, "noted")
        assert linear.decode_gemm.aligned(seen[-1])
        assert torch.equal(seen[-1], x)


@pytest.mark.parametrize(("tokens", "most", "small_m"), [(4, 4, True), (5, 4, False), (1, 0, False)])
def test_norms_are_made_for_few_tokens_where_the_decode_gemm_takes_them(
    tokens: int, most: int, small_m: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it takes none, as with `batch_invariant`, sums do not change with the number of tokens."""
    pytest.importorskip("triton", reason="needs Triton, which the CPU build does not bring")
    from vllm_fp8ext.kernels.quantize import rmsnorm_quantize

    norm, seen = rmsnorm_quantize.rmsnorm_quantize, []

    def noted(*arguments: Any, **named: Any) -> Any:
        seen.append(named)
        return norm(*arguments, **named)

    def multiply(x: Quantized, codes_NK: Tensor, *_: Any) -> Tensor:
        return torch.zeros(len(x.codes), len(codes_NK)).bfloat16()

    monkeypatch.setattr(rmsnorm_quantize, "rmsnorm_quantize", noted)
    monkeypatch.setattr(linear.decode_gemm, "decode_gemm", multiply)
    monkeypatch.setitem(linear.GEMM_KERNELS, "noted", GemmKernel(name="noted", run=multiply))
    x, codes, scales = operands(tokens, 7, 256, 3, torch.bfloat16, "fp32")
    norm_K = torch.ones(256).bfloat16()
    linear.rmsnorm_linear(x, None, norm_K, 1e-6, codes, scales, None, "fp32", most, "noted")
    assert seen == [{"small_m": small_m, "adds_one": False, "width": 256}]
