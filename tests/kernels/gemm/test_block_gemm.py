# SPDX-License-Identifier: Apache-2.0
"""The product of FP8 blocks against float64, for every format, edge and offset."""

import pytest
import torch

from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.numerics.quantized import Quantized
from vllm_fp8ext.kernels.numerics.reference import BLOCK
from vllm_fp8ext.kernels.testing import kernel_cases

pytest.importorskip("triton", reason="needs Triton, which the CPU build does not bring")
from vllm_fp8ext.kernels.gemm.block_gemm import block_gemm


@pytest.mark.parametrize("form", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize(
    ("m", "n", "k", "offset"),
    [(1, 1, 1, 0), (5, 64, 128, 0), (130, 200, 300, 0), (130, 200, 384, 100), (65, 129, 127, 127)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products(
    device: str, m: int, n: int, k: int, offset: int, form: torch.dtype, dtype: torch.dtype
) -> None:
    codes, scales = reference.quantize_weight(kernel_cases.weight(n + offset, k, "cpu"))
    x_codes, x_scales = reference.quantize_activation(kernel_cases.activations(m, k, "cpu"))
    x = Quantized(x_codes.float().to(form).to(device), x_scales.to(device))
    out = block_gemm(x, codes[offset:].to(device), scales.to(device), dtype, offset=offset).cpu().double()
    x_values = x.codes.cpu().double() * x_scales.double().repeat_interleave(BLOCK, 1)[:, :k]
    weight = reference.dequantize_weight(codes, scales)[offset:].double()
    magnitude = x_values.abs() @ weight.abs().T
    # tensor cores keep about 14 bits of each of 128 products, and the result is rounded once
    bound = magnitude * 2.0**-12 + (x_values @ weight.T).abs() * torch.finfo(dtype).eps
    assert ((out - x_values @ weight.T).abs() <= bound).all()


def test_of_nothing(device: str) -> None:
    x = Quantized(*(part.to(device) for part in reference.quantize_activation(torch.ones(0, 128))))
    codes, scales = reference.quantize_weight(torch.ones(64, 128))
    assert block_gemm(x, codes.to(device), scales.to(device), torch.bfloat16).shape == (0, 64)
