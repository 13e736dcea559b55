# SPDX-License-Identifier: Apache-2.0
"""FP8 operands transposed and read, against torch, bit for bit."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.numerics.quantized import Quantized
from vllm_fp8ext.kernels.numerics.reference import BLOCK, ScaleFormat, blocks
from vllm_fp8ext.kernels.testing import hard_cases, kernel_cases

pytest.importorskip("triton", reason="needs Triton, which the CPU build does not bring")
from vllm_fp8ext.kernels.quantize.dequantize import dequantize
from vllm_fp8ext.kernels.quantize.transpose_blocks import requantize_transposed, transpose_weight

SIZES = st.one_of(st.integers(1, 5), st.sampled_from((127, 128, 129, 256)), st.integers(1, 400))
KINDS = st.sampled_from(("normal", "heavy", "zeros", "floor"))
FORMATS = st.sampled_from(("fp32", "pow2"))


@given(SIZES, SIZES, KINDS, FORMATS, st.integers(0, 2**32 - 2))
@example(129, 130, "heavy", "pow2", 0)
@settings(max_examples=30)
def test_activations_are_quantized_again_in_blocks(
    device: str, m: int, k: int, kind: str, scale_format: ScaleFormat, seed: int
) -> None:
    x = Quantized(
        *reference.quantize_activation(hard_cases.awkward(m, k, kind, torch.bfloat16, seed), scale_format)
    )
    codes, scales = requantize_transposed(Quantized(*(part.to(device) for part in x)), scale_format)
    values = torch.nn.functional.pad(reference.dequantize_activation(*x).T, (0, blocks(m) * BLOCK - m))
    expected = reference.quantize_weight(values, scale_format)
    assert kernel_cases.same(codes, expected[0])
    assert kernel_cases.same(scales, expected[1])


@given(SIZES, SIZES, KINDS, st.integers(0, 2**32 - 2))
@settings(max_examples=20)
def test_a_transposed_weight_is_the_weight(device: str, n: int, k: int, kind: str, seed: int) -> None:
    codes, scales = reference.quantize_weight(hard_cases.awkward(n, k, kind, torch.bfloat16, seed))
    turned = transpose_weight(codes.to(device), scales.to(device))
    assert kernel_cases.same(turned[0], codes.T.contiguous())
    assert kernel_cases.same(turned[1], scales.T.contiguous())


def test_what_is_not_finite_stays_in_its_block(device: str) -> None:
    x = Quantized(*reference.quantize_activation(torch.ones(200, 300)))
    x.scales[150, 1] = torch.nan
    _, scales = requantize_transposed(Quantized(*(part.to(device) for part in x)), "fp32")
    lost = torch.zeros(3, 2, dtype=torch.bool)
    lost[1, 1] = True
    assert torch.equal(scales.isfinite().cpu(), ~lost)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("m", "k", "offset"), [(1, 1, 0), (200, 300, 0), (200, 300, 100), (130, 128, 127)])
def test_values_are_products_rounded_once(
    device: str, m: int, k: int, offset: int, dtype: torch.dtype
) -> None:
    whole = hard_cases.awkward(m + offset, k, "normal", torch.bfloat16, 0)
    codes, scales = reference.quantize_weight(whole)
    part = dequantize(codes[offset:].to(device), scales.to(device), dtype, rows=BLOCK, offset=offset)
    assert torch.equal(part.cpu(), reference.dequantize_weight(codes, scales)[offset:].to(dtype))
    codes, scales = reference.quantize_activation(whole)
    values = dequantize(codes.to(device), scales.to(device), dtype)
    assert torch.equal(values.cpu(), reference.dequantize_activation(codes, scales).to(dtype))
    wide = codes.float().to(torch.float8_e5m2)
    values = dequantize(wide.to(device), scales.to(device), dtype)
    expected = wide.float() * scales.repeat_interleave(BLOCK, 1)[:, :k]
    assert torch.equal(values.cpu(), expected.to(dtype))
