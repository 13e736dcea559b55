# SPDX-License-Identifier: Apache-2.0
"""The decode GEMM in Triton against the reference."""

import pytest
import torch

from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.numerics.reference import ScaleFormat
from vllm_fp8ext.kernels.testing import hard_cases, kernel_cases

pytest.importorskip("triton", reason="needs Triton, which the CPU build does not bring")
from vllm_fp8ext.kernels.gemm.decode_gemm_triton import TritonTileConfig, decode_gemm_triton


@pytest.mark.parametrize("kind", hard_cases.GEMM_KINDS)
@pytest.mark.parametrize(
    ("m", "n", "k", "splits", "rows", "biased", "scale_format"),
    [
        (1, 128, 256, 1, 128, False, "fp32"),
        (5, 200, 130, 2, 64, True, "pow2"),
        (17, 64, 130, 1, 64, True, "fp32"),
        (3, 130, 400, 4, 128, False, "pow2"),
        (2, 9, 70, 4, 64, True, "fp32"),
    ],
)
def test_results_stay_within_the_bound(
    device: str,
    m: int,
    n: int,
    k: int,
    splits: int,
    rows: int,
    biased: bool,
    scale_format: ScaleFormat,
    kind: str,
) -> None:
    x, weight = hard_cases.gemm_inputs(m, n, k, kind, device)
    codes, scales = reference.quantize_weight(weight, scale_format)
    bias = kernel_cases.activations(1, n, device, 3)[0] if biased else None
    config = TritonTileConfig(splits=splits, rows=rows)
    out = decode_gemm_triton(x, codes, scales, bias, scale_format, config)
    expected = reference.quantize_activation(x, scale_format)
    assert (out.shape, out.dtype) == ((m, n), torch.bfloat16)
    assert kernel_cases.gemm_error(out, *expected, codes, scales, bias) < 1
