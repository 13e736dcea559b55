# SPDX-License-Identifier: Apache-2.0
"""MXFP4 against transformers' own conversion, and against single codes."""

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from vllm_fp8ext.kernels.numerics.mxfp4 import VALUES, dequantize_mxfp4


def test_it_is_transformers_conversion() -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 6, 3, 16), dtype=torch.uint8, generator=generator)
    exponents = torch.randint(110, 140, (2, 6, 3), dtype=torch.uint8, generator=generator)
    expected = convert_moe_packed_tensors(blocks.clone(), exponents.clone())
    assert torch.equal(dequantize_mxfp4(blocks, exponents).transpose(1, 2), expected)


def test_the_lower_half_of_a_byte_comes_first() -> None:
    blocks = torch.arange(16, dtype=torch.uint8).view(1, 1, 16) << 4 | 1
    values = dequantize_mxfp4(blocks, torch.full((1, 1), 128, dtype=torch.uint8), torch.float32)
    assert values[0, ::2].tolist() == [1.0] * 16
    assert torch.equal(values[0, 1::2], VALUES * 2)


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(ValueError, match=r"found \[1, 2, 16\] and \[1, 3\]"):
        dequantize_mxfp4(torch.zeros(1, 2, 16, dtype=torch.uint8), torch.zeros(1, 3, dtype=torch.uint8))
