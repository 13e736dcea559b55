# SPDX-License-Identifier: Apache-2.0
"""The fused activation function against its reference, bit for bit.

Exponentials and error functions differ in their last bits between libraries. Gates whose function lies so near the middle of
two numbers of the dtype that those bits decide are left out.
"""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_fp8ext.kernels.numerics.reference import BLOCK, ScaleFormat
from vllm_fp8ext.kernels.testing import hard_cases, kernel_cases

pytest.importorskip("triton", reason="needs Triton, which the CPU build does not bring")
from vllm_fp8ext.kernels.quantize.gated_quantize import (
    ACTIVATIONS,
    GROUPS,
    Activation,
    gated_quantize,
    gated_quantize_reference,
)

SIZES = st.one_of(st.integers(1, 5), st.sampled_from((127, 128, 129, 1024)), st.integers(1, 2500))
KINDS = st.sampled_from(("normal", "heavy", "zeros", "floor"))
MARGIN = 2.0**-16
"""Relative: 2^-24 in the exponent of e^x, where |x| < 100."""


def decided(gate: Tensor, activation: Activation = "silu") -> Tensor:
    """The gates, with zero in place of those that the last bits of a function decide."""
    x = gate.double()
    if activation == "silu":
        active = x * torch.sigmoid(x)
    else:
        approximate = "tanh" if activation == "gelu_tanh" else "none"
        active = torch.nn.functional.gelu(x, approximate=approximate)
    # 1 + erf, and in torch 1 + tanh, is near zero on the left, and as wrong as if it were near one
    margin = active.abs() * MARGIN + (0 if activation == "silu" else x.abs() * 2.0**-22)
    low, high = ((active + side * margin).to(gate.dtype) for side in (-1, 1))
    return torch.where(low == high, gate, torch.zeros_like(gate))


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@given(
    st.integers(1, 4),
    SIZES,
    KINDS,
    KINDS,
    st.sampled_from((torch.bfloat16, torch.float16)),
    st.sampled_from(ACTIVATIONS),
    st.sampled_from(("fp32", "pow2")),
    st.integers(0, 2**32 - 2),
)
@example(1, 1, "normal", "normal", torch.bfloat16, "gelu", "fp32", 0)
@example(1, GROUPS * BLOCK + 1, "normal", "heavy", torch.bfloat16, "gelu_tanh", "pow2", 0)
@settings(max_examples=60)
def test_codes_and_scales_are_the_references(
    device: str,
    m: int,
    k: int,
    gate_kind: str,
    up_kind: str,
    dtype: torch.dtype,
    activation: Activation,
    scale_format: ScaleFormat,
    seed: int,
) -> None:
    gate = decided(hard_cases.awkward(m, k, gate_kind, dtype, seed).clamp(-100, 100), activation)
    # products stay finite
    up = hard_cases.awkward(m, k, up_kind, dtype, seed + 1).clamp(-600, 600)
    gate_up = torch.cat((gate, up), 1)
    codes, scales = gated_quantize(gate_up.to(device), activation, scale_format)
    expected = gated_quantize_reference(gate_up, activation, scale_format)
    assert kernel_cases.same(codes, expected[0])
    assert kernel_cases.same(scales, expected[1])


@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("m", "k"), [(1, 200), (4, 1024), (5, 1200)])
def test_several_tokens_to_a_program(
    device: str,
    m: int,
    k: int,
    activation: Activation,
    scale_format: ScaleFormat,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vllm_fp8ext.kernels.quantize.quantize_activation._LARGE_M", 1)
    gate_up = decided(hard_cases.awkward(m, 2 * k, "normal", torch.bfloat16, k), activation)
    quantized = gated_quantize(gate_up.to(device), activation, scale_format)
    expected = gated_quantize_reference(gate_up, activation, scale_format)
    assert all(kernel_cases.same(*parts) for parts in zip(quantized, expected, strict=True))


def test_rows_may_lie_apart(device: str) -> None:
    wide = decided(hard_cases.awkward(3, 900, "normal", torch.bfloat16))
    codes, scales = gated_quantize(wide.to(device)[:, 100:700], "silu", "fp32")
    expected = gated_quantize_reference(wide[:, 100:700], "silu", "fp32")
    assert kernel_cases.same(codes, expected[0])
    assert kernel_cases.same(scales, expected[1])


def test_scales_lie_by_column_or_by_token(device: str) -> None:
    gate_up = decided(hard_cases.awkward(5, 600, "normal", torch.bfloat16))
    expected = gated_quantize_reference(gate_up, "silu", "fp32")
    for by_token, strides in ((False, (1, 8)), (True, (3, 1))):
        codes, scales = gated_quantize(gate_up.to(device), "silu", "fp32", by_token=by_token)
        assert scales.stride() == strides
        assert kernel_cases.same(codes, expected[0])
        assert kernel_cases.same(scales, expected[1])


def test_no_tokens_make_no_codes(device: str) -> None:
    codes, scales = gated_quantize(torch.empty(0, 600, dtype=torch.bfloat16, device=device), "silu", "fp32")
    assert (codes.shape, scales.shape) == ((0, 300), (0, 3))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("column", [200, 500], ids=["gate", "up"])
def test_scales_show_what_is_not_finite(device: str, value: float, column: int) -> None:
    gate_up = decided(hard_cases.awkward(2, 600, "normal", torch.bfloat16) + 1)
    gate_up[1, column] = value
    codes, scales = gated_quantize(gate_up.to(device), "silu", "fp32")
    expected = gated_quantize_reference(gate_up, "silu", "fp32")
    torch.testing.assert_close(scales.cpu(), expected[1], rtol=0, atol=0, equal_nan=True)
    assert torch.isfinite(scales).tolist() == [[True, True, True], [True, False, True]]
    assert kernel_cases.same(codes[0], expected[0][0])


def test_rows_that_are_not_named_are_left_alone(device: str) -> None:
    gate_up = decided(hard_cases.awkward(4, 600, "normal", torch.bfloat16))
    rows = torch.tensor([2, -1, 0], dtype=torch.int32, device=device)
    codes, scales = gated_quantize(gate_up.to(device), "silu", "fp32", rows)
    expected = gated_quantize_reference(gate_up, "silu", "fp32")
    assert (codes.shape, scales.shape) == ((4, 300), (4, 3))
    for row in (0, 2):
        assert kernel_cases.same(codes[row], expected[0][row])
        assert kernel_cases.same(scales[row], expected[1][row])
