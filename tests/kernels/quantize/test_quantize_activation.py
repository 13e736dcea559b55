# SPDX-License-Identifier: Apache-2.0
"""The activation kernel against the reference, bit for bit."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.numerics.reference import BLOCK, ScaleFormat
from vllm_fp8ext.kernels.testing import hard_cases, kernel_cases

pytest.importorskip("triton", reason="needs Triton, which the CPU build does not bring")
from vllm_fp8ext.kernels.numerics.quantized import empty
from vllm_fp8ext.kernels.quantize.quantize_activation import (
    _LARGE_M,
    GROUPS,
    large_m,
    quantize_activation,
    quantize_into,
    quantize_to_rows,
)

SIZES = st.one_of(st.integers(1, 5), st.sampled_from((127, 128, 129, 1024)), st.integers(1, 2500))
DTYPES = st.sampled_from((torch.bfloat16, torch.float16, torch.float32))


@given(
    st.integers(1, 4),
    SIZES,
    st.sampled_from(hard_cases.KINDS),
    DTYPES,
    st.sampled_from(("fp32", "pow2")),
    st.integers(0, 2**32 - 1),
)
@example(1, 1, "zeros", torch.bfloat16, "fp32", 0)
@example(1, GROUPS * BLOCK + 1, "heavy", torch.bfloat16, "pow2", 0)
@settings(max_examples=50)
def test_codes_and_scales_are_the_references(
    device: str, m: int, k: int, kind: str, dtype: torch.dtype, scale_format: ScaleFormat, seed: int
) -> None:
    x = hard_cases.awkward(m, k, kind, dtype, seed)
    codes, scales = quantize_activation(x.to(device), scale_format)
    expected = reference.quantize_activation(x, scale_format)
    assert kernel_cases.same(codes, expected[0])
    assert kernel_cases.same(scales, expected[1])


@pytest.mark.parametrize("several", [False, True])
def test_rows_may_be_wider_up_to_whole_blocks(
    device: str, several: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns behind are zero, whatever was there. Two programs write a row: it has more groups than one takes."""
    if several:
        monkeypatch.setattr("vllm_fp8ext.kernels.quantize.quantize_activation._LARGE_M", 1)
    k = GROUPS * BLOCK + 16
    x = hard_cases.awkward(5, k, "heavy", torch.bfloat16, 0)
    codes, scales = quantize_activation(x.to(device), "fp32", width=k + 112)
    expected = reference.quantize_activation(x, "fp32")
    assert codes.shape == (5, k + 112)
    assert kernel_cases.same(codes[:, :k], expected[0])
    assert not codes[:, k:].view(torch.uint8).any()
    assert kernel_cases.same(scales, expected[1])


@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("m", "k"), [(1, 200), (3, 1024), (4, 1200), (9, 384)])
def test_several_tokens_to_a_program(
    device: str,
    m: int,
    k: int,
    dtype: torch.dtype,
    scale_format: ScaleFormat,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vllm_fp8ext.kernels.quantize.quantize_activation._LARGE_M", 1)
    x = hard_cases.awkward(m, k, "heavy", dtype, m)
    expected = reference.quantize_activation(x, scale_format)
    for by_token in (False, True):
        room = empty(m + 2, k, torch.device(device), by_token=by_token)
        room.codes.view(torch.uint8).fill_(7)
        room.scales.fill_(7)
        quantize_into(room, x.to(device), scale_format)
        assert kernel_cases.same(room.codes[:m], expected[0])
        assert kernel_cases.same(room.scales[:m], expected[1])
        assert room.codes[m:].view(torch.uint8).eq(7).all(), "what is behind them stays"
        assert room.scales[m:].eq(7).all()


@pytest.mark.parametrize(("k", "tokens"), [(1, _LARGE_M), (1025, _LARGE_M / 2), (12288, -(-_LARGE_M // 12))])
def test_programs_take_several_tokens_where_there_are_many(k: int, tokens: int) -> None:
    assert large_m(k) == tokens


@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
def test_scales_at_every_power_boundary(device: str, scale_format: ScaleFormat) -> None:
    """448 times each power of two, and its neighbours in BF16, as the largest value of a group."""
    largest = torch.tensor([446.0, 448.0, 450.0])[:, None] * torch.exp2(torch.arange(-42.0, 119.0))
    x = hard_cases.awkward(3, 161 * BLOCK, "edge", torch.bfloat16).float().view(3, 161, BLOCK) / 2**40
    x = (x.clamp(-1, 1) * largest[:, :, None]).flatten(1).bfloat16()
    x[:, 1::BLOCK] = largest.bfloat16()
    codes, scales = quantize_activation(x.to(device), scale_format)
    expected = reference.quantize_activation(x, scale_format)
    assert kernel_cases.same(codes, expected[0])
    assert kernel_cases.same(scales, expected[1])


def test_rows_may_lie_apart(device: str) -> None:
    wide = hard_cases.awkward(5, 900, "heavy", torch.bfloat16)
    codes, scales = quantize_activation(wide.to(device)[::2, 100:400], "fp32")
    expected = reference.quantize_activation(wide[::2, 100:400], "fp32")
    assert kernel_cases.same(codes, expected[0])
    assert kernel_cases.same(scales, expected[1])


def test_scales_lie_by_column_or_by_token(device: str) -> None:
    x = hard_cases.awkward(5, 300, "heavy", torch.bfloat16)
    expected = reference.quantize_activation(x, "fp32")
    for by_token, strides in ((False, (1, 8)), (True, (3, 1))):
        codes, scales = quantize_activation(x.to(device), "fp32", 8, by_token=by_token)
        assert (codes.shape, scales.shape, scales.stride()) == ((8, 300), (8, 3), strides)
        assert kernel_cases.same(codes[:5], expected[0])
        assert kernel_cases.same(scales[:5], expected[1])


def test_no_tokens_make_no_codes(device: str) -> None:
    codes, scales = quantize_activation(torch.empty(0, 300, device=device), "fp32")
    assert (codes.shape, scales.shape) == ((0, 300), (0, 3))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_only_the_groups_scale_shows_what_is_not_finite(
    device: str, value: float, scale_format: ScaleFormat
) -> None:
    x = hard_cases.awkward(2, 300, "normal", torch.bfloat16)
    expected = reference.quantize_activation(x, scale_format)
    x[1, 200] = value
    codes, scales = (part.cpu() for part in quantize_activation(x.to(device), scale_format))
    torch.testing.assert_close(
        scales[1, 1], reference.quantize_activation(x, scale_format)[1][1, 1], equal_nan=True
    )
    assert not torch.isfinite(scales[1, 1])
    scales[1, 1] = expected[1][1, 1]
    assert kernel_cases.same(scales, expected[1])
    codes.view(torch.uint8)[1, BLOCK : 2 * BLOCK] = expected[0].view(torch.uint8)[1, BLOCK : 2 * BLOCK]
    assert kernel_cases.same(codes, expected[0])


@pytest.mark.parametrize("least", [_LARGE_M, 1])
def test_tokens_are_written_to_the_rows_that_are_named(
    device: str, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_fp8ext.kernels.quantize.quantize_activation._LARGE_M", least)
    x = hard_cases.awkward(3, 300, "heavy", torch.bfloat16)
    places = torch.tensor([[5, 0], [-1, 3], [-1, -1]], dtype=torch.int32, device=device)
    codes, scales = quantize_to_rows(x.to(device), "fp32", 8, places)
    expected = reference.quantize_activation(x, "fp32")
    assert (codes.shape, scales.shape) == ((8, 300), (8, 3))
    for token, row in ((0, 5), (0, 0), (1, 3)):
        assert kernel_cases.same(codes[row], expected[0][token])
        assert kernel_cases.same(scales[row], expected[1][token])
