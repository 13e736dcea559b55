# SPDX-License-Identifier: Apache-2.0
"""Where quantized outputs of `DecodeAttention` may go, which is looked at before anything is launched."""

from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_fp8ext.kernels.attention.decode_attention import HEAD_DIMENSION, DecodeAttention, DecodeStep
from vllm_fp8ext.kernels.numerics import quantized
from vllm_fp8ext.kernels.numerics.quantized import Quantized
from vllm_fp8ext.kernels.numerics.reference import FP8_DTYPE

REQUESTS, HEADS, KV_HEADS = 3, 8, 2
COLUMNS = HEADS * HEAD_DIMENSION
ROOM = quantized.empty(REQUESTS, COLUMNS, torch.device("cpu"))


CACHE = torch.zeros(4, KV_HEADS, 32, 2 * HEAD_DIMENSION, dtype=torch.bfloat16)


def prepared() -> DecodeAttention:
    attend = DecodeAttention.__new__(DecodeAttention)  # what compiles for a GPU is left out
    attend.heads, attend.kv_heads, attend.requests, attend.dtype = HEADS, KV_HEADS, REQUESTS, torch.bfloat16
    attend._held = None
    return attend


def step(cache: Tensor = CACHE) -> DecodeStep:
    query, key, value = (
        torch.zeros(REQUESTS, heads, HEAD_DIMENSION, dtype=torch.bfloat16)
        for heads in (HEADS, *[KV_HEADS] * 2)
    )
    table, lengths = (torch.ones(*shape, dtype=torch.int32) for shape in ((REQUESTS, 4), (REQUESTS,)))
    slots, ones = torch.zeros(REQUESTS, dtype=torch.int64), torch.ones(1)
    return DecodeStep(query, key, value, cache, table, lengths, slots, (ones, ones, ones), 1.0)


def check(out: Quantized) -> None:
    prepared()._check(step(), out)


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


def _like_cache(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)


@pytest.mark.parametrize(
    "cache",
    [
        _like_cache(4, KV_HEADS + 1, 32, 256),
        _like_cache(4, KV_HEADS, 24, 256),
        _like_cache(4, KV_HEADS, 32, 128),
        _like_cache(4, KV_HEADS, 32, 512)[..., ::2],
        _like_cache(4, KV_HEADS, 32, 264)[..., 4:260],
        _like_cache(4, KV_HEADS, 32, 256, dtype=torch.float32),
    ],
    ids=["heads", "tokens", "columns", "strides", "address", "dtype"],
)
def test_other_caches_are_refused_after_one_that_is_right(cache: Tensor) -> None:
    """What was right once is not looked at again."""
    attend = prepared()
    attend._check(step(), ROOM)
    with pytest.raises(
        ValueError, match=r"expected a cache \[blocks, 2, a multiple of 16, 256\] in torch.bfloat16"
    ):
        attend._check(step(cache), ROOM)
    attend._check(step(), ROOM)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"key_RGD": torch.zeros(3, 2, 128)}, r"BF16 keys and values \(3, 2, 128\)"),
        ({"value_RGD": torch.zeros(3, 1, 128, dtype=torch.bfloat16)}, "BF16 keys and values"),
        ({"query_RHD": torch.zeros(3, 8, 128)}, r"queries \(3, 8, 128\) in torch.bfloat16"),
        ({"value_RGD": torch.zeros(3, 2, 256, dtype=torch.bfloat16)[..., ::2]}, "heads side by side"),
        ({"table_RB": torch.ones(2, 4, dtype=torch.int32)}, "a table with a row for each"),
        ({"table_RB": torch.ones(3, 4)}, "int32 lengths"),
        ({"lengths_R": torch.ones(3)}, "int32 lengths"),
        ({"slots_R": torch.zeros(2, dtype=torch.int64)}, "int64 slots"),
        ({"slots_R": torch.zeros(3)}, "int64 slots"),
        ({"scales": (torch.ones(1), torch.ones(2), torch.ones(1))}, "fp32 scales, all 1 or all 2"),
        ({"scales": (torch.ones(3),) * 3}, "fp32 scales"),
        ({"scales": (torch.ones(2).double(),) * 3}, "fp32 scales"),
        ({"scales": (torch.ones(4)[::2],) * 3}, "fp32 scales"),
    ],
    ids=lambda part: "".join(part) if isinstance(part, dict) else "",
)
def test_other_steps_are_refused(changed: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=f"decode_attention: expected .*{problem}"):
        prepared()._check(step()._replace(**changed), ROOM)
