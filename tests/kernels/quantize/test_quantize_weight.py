# SPDX-License-Identifier: Apache-2.0
"""Quantization by slices against the reference on the whole."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.numerics.reference import BLOCK, NonFiniteError, ScaleFormat
from vllm_fp8ext.kernels.quantize import quantize_weight

SIZES = st.one_of(st.integers(1, 5), st.sampled_from((127, 128, 129, 256, 257, 384)), st.integers(1, 520))
DTYPES = st.sampled_from((torch.bfloat16, torch.float16, torch.float32))
FORMATS = st.sampled_from(("fp32", "pow2"))


def random(rows: int, columns: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    noise = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=noise) * torch.rand(rows, 1, generator=noise)).to(dtype)


def filled(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Destinations full of what a forgotten element would show."""
    codes, scales = quantize_weight.empty_like(weight)
    codes.view(torch.uint8).fill_(0x7F)
    return codes, scales.fill_(float("nan"))


def same(first: Tensor, second: Tensor) -> bool:
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


@given(SIZES, SIZES, st.integers(0, 2**32 - 1), DTYPES, FORMATS, st.sampled_from((1, 5_000, 40_000, 1 << 22)))
@settings(max_examples=30)
def test_slices_make_the_references_codes_and_scales(
    rows: int, columns: int, seed: int, dtype: torch.dtype, scale_format: ScaleFormat, slice_elements: int
) -> None:
    weight = random(rows, columns, seed, dtype)
    codes, scales = filled(weight)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantize_weight, "_SLICE_ELEMENTS", slice_elements)
        error, norm = quantize_weight.quantize_weight(weight, codes, scales, scale_format)
    expected_codes, expected_scales = reference.quantize_weight(weight, scale_format)
    assert same(codes, expected_codes)
    assert same(scales, expected_scales)
    values = weight.double()
    lost = reference.dequantize_weight(expected_codes, expected_scales).double() - values
    assert error == pytest.approx(lost.square().sum().item(), rel=1e-4, abs=1e-12)
    assert norm == pytest.approx(values.square().sum().item(), rel=1e-5)


def test_the_memory_bound_cuts_at_block_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several slices are really made, each a multiple of 128 rows, and none has more elements than
    allowed."""
    shapes = []
    whole = reference.quantize_weight

    def spy(weight: Tensor, scale_format: ScaleFormat) -> tuple[Tensor, Tensor]:
        shapes.append(tuple(weight.shape))
        return whole(weight, scale_format)

    monkeypatch.setattr(reference, "quantize_weight", spy)
    monkeypatch.setattr(quantize_weight, "_SLICE_ELEMENTS", 2 * BLOCK * 50 + 1)
    weight = random(600, 50, 0)
    quantize_weight.quantize_weight(weight, *filled(weight), "fp32")
    assert shapes == [(256, 50), (256, 50), (88, 50)]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("row", [0, 200, 299])
def test_non_finite_values_are_refused_in_any_slice(
    monkeypatch: pytest.MonkeyPatch, value: float, row: int
) -> None:
    monkeypatch.setattr(quantize_weight, "_SLICE_ELEMENTS", 1)
    weight = random(300, 70, 1)
    weight[row, 69] = value
    codes, scales = filled(weight)
    with pytest.raises(NonFiniteError):
        quantize_weight.quantize_weight(weight, codes, scales, "fp32")
    done = row // BLOCK * BLOCK
    assert same(codes[:done], reference.quantize_weight(weight[:done])[0] if done else codes[:0])
    assert (codes[done:].view(torch.uint8) == 0x7F).all()


def test_views_are_read_and_written_in_place() -> None:
    """A transposed source, and a destination that is a part of a fused layer."""
    weight = random(140, 260, 2).T
    codes, scales = torch.zeros(388, 140).to(torch.float8_e4m3fn), torch.zeros(4, 2)
    quantize_weight.quantize_weight(weight, codes[128:], scales[1:], "pow2")
    expected_codes, expected_scales = reference.quantize_weight(weight, "pow2")
    assert same(codes[128:], expected_codes)
    assert same(scales[1:], expected_scales)
    assert (codes[:128].float() == 0).all()
    assert (scales[0] == 0).all()


def test_empty_like_has_the_canonical_layout() -> None:
    codes, scales = quantize_weight.empty_like(torch.empty(129, 300, device="meta"), torch.device("cpu"))
    assert (codes.shape, codes.dtype, codes.device.type) == ((129, 300), torch.float8_e4m3fn, "cpu")
    assert (scales.shape, scales.dtype, scales.device.type) == ((2, 3), torch.float32, "cpu")
    assert quantize_weight.empty_like(torch.empty(1, 1, device="meta"))[0].device.type == "meta"
