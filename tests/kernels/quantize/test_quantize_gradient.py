# SPDX-License-Identifier: Apache-2.0
"""Gradients in E4M3 and E5M2, along columns and along tokens, against torch, bit for bit."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_fp8ext.kernels.numerics.reference import BLOCK, FP8_MAX, ScaleFormat, blocks, scale_of
from vllm_fp8ext.kernels.testing import hard_cases, kernel_cases

pytest.importorskip("triton", reason="needs Triton, which the CPU build does not bring")
from vllm_fp8ext.kernels.quantize import quantize_gradient as kernel

MOST = {torch.float8_e4m3fn: FP8_MAX, torch.float8_e5m2: 57344.0}
SIZES = st.one_of(st.integers(1, 5), st.sampled_from((63, 64, 65, 127, 128, 129, 256)), st.integers(1, 400))


def expected(x_MK: Tensor, scale_format: ScaleFormat, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes of rows, and scales, by torch's own conversions."""
    m, k = x_MK.shape
    groups = torch.nn.functional.pad(x_MK.float(), (0, blocks(k) * BLOCK - k)).view(m, blocks(k), BLOCK)
    scales = scale_of(groups.abs().amax(2), scale_format) * (FP8_MAX / MOST[dtype])
    codes = (groups / scales[:, :, None]).clamp(-MOST[dtype], MOST[dtype]).to(dtype)
    return codes.view(m, -1)[:, :k].contiguous(), scales


@given(
    SIZES,
    SIZES,
    st.sampled_from(("normal", "heavy", "zeros", "floor")),
    st.sampled_from((torch.bfloat16, torch.float16, torch.float32)),
    st.sampled_from(tuple(MOST)),
    st.sampled_from(("fp32", "pow2")),
    st.integers(0, 2**32 - 2),
)
@example(1, 1, "normal", torch.bfloat16, torch.float8_e5m2, "fp32", 0)
@example(129, 65, "heavy", torch.float32, torch.float8_e5m2, "pow2", 0)
@settings(max_examples=40)
def test_both_ways_are_torchs(
    device: str,
    m: int,
    k: int,
    kind: str,
    dtype: torch.dtype,
    form: torch.dtype,
    scale_format: ScaleFormat,
    seed: int,
) -> None:
    x = hard_cases.awkward(m, k, kind, dtype, seed)
    rows = kernel.quantize_rows(x.to(device), scale_format, form)
    assert [kernel_cases.same(a, b) for a, b in zip(rows, expected(x, scale_format, form), strict=True)] == [
        True
    ] * 2
    columns = kernel.quantize_columns(x.to(device), scale_format, form)
    padded = torch.nn.functional.pad(x.T, (0, blocks(m) * BLOCK - m))
    wanted = expected(padded, scale_format, form)
    assert [kernel_cases.same(a, b) for a, b in zip(columns, wanted, strict=True)] == [True] * 2


@pytest.mark.parametrize("form", MOST)
def test_nan_stays_in_its_group(device: str, form: torch.dtype) -> None:
    x = torch.ones(200, 300, dtype=torch.bfloat16, device=device)
    x[150, 140] = torch.nan
    for quantized, group in (
        (kernel.quantize_rows(x, "fp32", form), (150, 1)),
        (kernel.quantize_columns(x, "fp32", form), (140, 1)),
    ):
        lost = torch.zeros_like(quantized.scales, dtype=torch.bool)
        lost[group] = True
        assert torch.equal(quantized.scales.isnan(), lost)


def test_other_strides_and_no_tokens(device: str) -> None:
    x = torch.randn(300, 200, dtype=torch.bfloat16, device=device)
    codes, scales = kernel.quantize_rows(x.T, "fp32", torch.float8_e4m3fn)
    same = kernel.quantize_rows(x.T.contiguous(), "fp32", torch.float8_e4m3fn)
    assert kernel_cases.same(codes, same.codes)
    assert kernel_cases.same(scales, same.scales)
    assert kernel.quantize_columns(x[:0], "fp32").codes.shape == (200, 0)
    assert kernel.quantize_rows(x[:0], "fp32", torch.float8_e5m2).codes.shape == (0, 200)
