# SPDX-License-Identifier: Apache-2.0
"""Where quantized outputs of `DecodeAttention` may go, which is looked at before anything is launched."""

import pytest
import torch
from torch import Tensor

from vllm_fp8ext.kernels import quantized
from vllm_fp8ext.kernels.decode_attention import HEAD_DIMENSION, DecodeAttention, Step
from vllm_fp8ext.kernels.quantized import Quantized
from vllm_fp8ext.kernels.reference import FP8_DTYPE

REQUESTS, HEADS, KV_HEADS = 3, 8, 2
COLUMNS = HEADS * HEAD_DIMENSION
ROOM = quantized.empty(REQUESTS, COLUMNS, torch.device("cpu"))


def check(out: Quantized) -> None:
    attend = DecodeAttention.__new__(DecodeAttention)  # what compiles for a GPU is left out
    attend.heads, attend.kv_heads, attend.requests, attend.dtype = HEADS, KV_HEADS, REQUESTS, torch.bfloat16
    query, key, value = (
        torch.zeros(REQUESTS, heads, HEAD_DIMENSION, dtype=torch.bfloat16)
        for heads in (HEADS, *[KV_HEADS] * 2)
    )
    cache = torch.zeros(4, KV_HEADS, 32, 2 * HEAD_DIMENSION, dtype=torch.bfloat16)
    table, lengths = (torch.ones(*shape, dtype=torch.int32) for shape in ((REQUESTS, 4), (REQUESTS,)))
    slots, ones = torch.zeros(REQUESTS, dtype=torch.int64), torch.ones(1)
    attend._check(Step(query, key, value, cache, table, lengths, slots, (ones, ones, ones), 1.0), out)


def test_room_as_it_is_made() -> None:
    check(ROOM)


@pytest.mark.parametrize(
    "codes",
    [
        torch.zeros(REQUESTS, COLUMNS + 4).to(FP8_DTYPE),
        torch.zeros(REQUESTS, COLUMNS, dtype=torch.bfloat16),
        torch.zeros(REQUESTS * COLUMNS + 1, dtype=torch.uint8)[1:].view(FP8_DTYPE).view(REQUESTS, COLUMNS),
    ],
    ids=["columns", "dtype", "address"],
)
def test_other_codes_are_refused(codes: Tensor) -> None:
    with pytest.raises(ValueError, match=rf"expected codes \(3, {COLUMNS}\) in torch.float8_e4m3fn"):
        check(Quantized(codes, ROOM.scales))


@pytest.mark.parametrize(
    "scales",
    [torch.zeros(REQUESTS, HEADS), ROOM.scales[:, :-1], ROOM.scales.double()],
    ids=["by token", "columns", "dtype"],
)
def test_other_scales_are_refused(scales: Tensor) -> None:
    with pytest.raises(ValueError, match=r"expected fp32 scales of outputs \(3, 8\), requests adjacent"):
        check(Quantized(ROOM.codes, scales))
