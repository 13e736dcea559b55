# SPDX-License-Identifier: Apache-2.0
"""The weight kernel against the reference, bit for bit."""

from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.numerics.reference import BLOCK, ScaleFormat
from vllm_fp8ext.kernels.quantize.quantize_weight import empty_like
from vllm_fp8ext.kernels.testing import hard_cases, kernel_cases

pytest.importorskip("triton", reason="needs Triton, which the CPU build does not bring")
from vllm_fp8ext.kernels.quantize import quantize_weight_triton

SIZES = st.one_of(st.integers(1, 5), st.sampled_from((127, 128, 129, 256)), st.integers(1, 300))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def filled(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Destinations full of what a forgotten element would show."""
    codes, scales = empty_like(weight)
    codes.view(torch.uint8).fill_(0x7F)
    return codes, scales.fill_(float("nan"))


@given(
    SIZES,
    SIZES,
    st.sampled_from(hard_cases.KINDS),
    st.sampled_from(DTYPES),
    st.sampled_from(("fp32", "pow2")),
    st.integers(0, 2**32 - 1),
)
@example(1, 1, "zeros", torch.bfloat16, "fp32", 0)
@example(1, 300, "heavy", torch.bfloat16, "pow2", 0)
@example(256, 256, "zeros", torch.bfloat16, "fp32", 0)
@example(256, 128, "heavy", torch.float32, "fp32", 0)
@settings(max_examples=30)
def test_codes_and_scales_are_the_references(
    device: str,
    rows: int,
    columns: int,
    kind: str,
    dtype: torch.dtype,
    scale_format: ScaleFormat,
    seed: int,
) -> None:
    weight = hard_cases.awkward(rows, columns, kind, dtype, seed)
    codes, scales = filled(weight.to(device))
    quantize_weight_triton.launch(weight.to(device), codes, scales, scale_format)
    expected = reference.quantize_weight(weight, scale_format)
    assert kernel_cases.same(codes, expected[0])
    assert kernel_cases.same(scales, expected[1])


@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sums_are_the_error_and_the_norm(
    device: str, dtype: torch.dtype, scale_format: ScaleFormat
) -> None:
    weights = [
        hard_cases.awkward(*shape, "normal", dtype, 1) for shape in ((130, 70), (128, 256), (1, 5), (130, 1))
    ]
    for weight in weights:
        here = weight.to(device)
        codes, scales = filled(here)
        sums = torch.empty(*scales.shape, 3, device=device)
        quantize_weight_triton.launch(here, codes, scales, scale_format, sums)
        error, norm, wrong = sums.double().sum(dim=(0, 1)).tolist()
        assert wrong == 0
        expected = reference.dequantize_weight(*reference.quantize_weight(weight, scale_format)).double()
        assert error == pytest.approx((expected - weight.double()).square().sum().item(), rel=1e-4)
        assert norm == pytest.approx(weight.double().square().sum().item(), rel=1e-4)


def test_views_are_read_and_written_in_place(device: str) -> None:
    """A transposed source, and a destination that is a part of a larger matrix in both directions."""
    weight = hard_cases.awkward(140, 260, "heavy", torch.bfloat16).to(device).T
    codes = torch.zeros(388, 300, dtype=torch.uint8, device=device)
    scales = torch.zeros(4, 5, device=device)
    inside = codes[128:, 32:172].view(torch.float8_e4m3fn)
    quantize_weight_triton.launch(weight, inside, scales[1:, 1:3], "pow2")
    expected = reference.quantize_weight(weight.cpu(), "pow2")
    assert kernel_cases.same(inside, expected[0])
    assert kernel_cases.same(scales[1:, 1:3], expected[1])
    inside.view(torch.uint8).zero_()
    scales[1:, 1:3] = 0
    assert not codes.any()
    assert not scales.any()


def test_columns_that_lie_very_far_apart(device: str, tmp_path: Path) -> None:
    """A transposed slice of a trainer's wide buffer: the last column begins more than 2^31 elements behind the first."""
    apart = 9_000_000
    if device == "cpu":  # a file with holes, of which a few pages are there
        file = str(tmp_path / "wide")
        flat = torch.from_file(file, shared=True, size=300 * apart, dtype=torch.bfloat16)
    else:
        flat = torch.empty(300 * apart, dtype=torch.bfloat16, device=device)
    weight = flat.as_strided((130, 300), (1, apart))
    weight.copy_(hard_cases.awkward(130, 300, "heavy", torch.bfloat16))
    codes, scales = empty_like(weight)
    quantize_weight_triton.launch(weight, codes, scales, "fp32")
    expected = reference.quantize_weight(weight.cpu().contiguous(), "fp32")
    assert kernel_cases.same(codes, expected[0])
    assert kernel_cases.same(scales, expected[1])


def test_destinations_of_another_shape_or_with_columns_apart_are_refused(device: str) -> None:
    weight = torch.zeros(4, 6, device=device)
    codes, scales = empty_like(weight)
    for wrong in (codes[:3], torch.zeros(6, 4, device=device).to(codes.dtype).T):
        with pytest.raises(ValueError, match="expected codes \\[4, 6\\] with contiguous columns"):
            quantize_weight_triton.launch(weight, wrong, scales, "fp32")


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_only_the_blocks_scale_shows_what_is_not_finite(
    device: str, value: float, scale_format: ScaleFormat
) -> None:
    weight = hard_cases.awkward(200, 300, "normal", torch.bfloat16)
    expected = reference.quantize_weight(weight, scale_format)
    weight[150, 130] = value
    codes, scales = filled(weight.to(device))
    sums = torch.zeros(*scales.shape, 3, device=device)
    quantize_weight_triton.launch(weight.to(device), codes, scales, scale_format, sums)
    assert torch.isfinite(scales).tolist() == [[True, True, True], [True, False, True]]
    assert sums[..., 2].tolist() == [[0, 0, 0], [0, 1, 0]]
    others = torch.ones(200, 300, dtype=torch.bool)
    others[BLOCK:, BLOCK : 2 * BLOCK] = False
    assert kernel_cases.same(codes.cpu().view(torch.uint8)[others], expected[0].view(torch.uint8)[others])
    finite = torch.isfinite(scales.cpu())
    assert kernel_cases.same(scales.cpu()[finite], expected[1][finite])
