# SPDX-License-Identifier: Apache-2.0
"""What `DecodeAttention` looks at before anything is launched, and its reference."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_fp8ext.kernels.attention.decode_attention import (
    AttentionKind,
    DecodeAttention,
    DecodeStep,
    decode_attention_reference,
)
from vllm_fp8ext.kernels.numerics import quantized
from vllm_fp8ext.kernels.numerics.quantized import Quantized
from vllm_fp8ext.kernels.numerics.reference import FP8_DTYPE

REQUESTS, HEADS, KV_HEADS = 3, 8, 2
HEAD_SIZE = 128
PLAIN = AttentionKind()
COLUMNS = HEADS * HEAD_SIZE
ROOM = quantized.empty(REQUESTS, COLUMNS, torch.device("cpu"))


CACHE = torch.zeros(4, KV_HEADS, 32, 2 * HEAD_SIZE, dtype=torch.bfloat16)


def prepared(kind: AttentionKind = PLAIN) -> DecodeAttention:
    attend = DecodeAttention.__new__(DecodeAttention)  # what compiles for a GPU is left out
    attend.heads, attend.kv_heads, attend.requests, attend.dtype = HEADS, KV_HEADS, REQUESTS, torch.bfloat16
    attend._held, attend.kind = None, kind
    return attend


def step(cache: Tensor = CACHE) -> DecodeStep:
    query, key, value = (
        torch.zeros(REQUESTS, heads, HEAD_SIZE, dtype=torch.bfloat16) for heads in (HEADS, *[KV_HEADS] * 2)
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


@pytest.mark.parametrize(
    ("kind", "sinks", "problem"),
    [
        (AttentionKind(), torch.ones(HEADS).bfloat16(), "no sinks"),
        (AttentionKind(sinks=True), None, r"BF16 sinks \(8,\)"),
        (AttentionKind(sinks=True), torch.ones(HEADS), r"BF16 sinks \(8,\)"),
        (AttentionKind(sinks=True), torch.ones(KV_HEADS).bfloat16(), r"BF16 sinks \(8,\)"),
        (AttentionKind(sinks=True), torch.ones(2 * HEADS).bfloat16()[::2], r"BF16 sinks \(8,\)"),
        (AttentionKind(sinks=True), torch.ones(HEADS).bfloat16(), None),
    ],
    ids=["unexpected", "missing", "dtype", "count", "strides", "right"],
)
def test_sinks_are_there_where_layers_have_them(
    kind: AttentionKind, sinks: Tensor | None, problem: str | None
) -> None:
    given = step()._replace(sinks_H=sinks)
    if problem is None:
        prepared(kind)._check(given, ROOM)
        return
    with pytest.raises(ValueError, match=f"decode_attention: expected {problem}"):
        prepared(kind)._check(given, ROOM)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "quantizes"),
    [
        (32, 8, 128, True),
        (28, 4, 128, True),
        (16, 8, 256, True),
        (32, 8, 64, True),
        (14, 2, 64, False),
        (32, 32, 96, False),
    ],
)
def test_outputs_are_quantized_where_one_warp_has_all_of_a_scale(
    heads: int, kv_heads: int, size: int, quantizes: bool
) -> None:
    attend = prepared(AttentionKind(size))
    attend.heads, attend.kv_heads = heads, kv_heads
    assert attend.quantizes == quantizes


def test_room_for_outputs_that_are_not_quantized_is_refused() -> None:
    attend = prepared(AttentionKind(96))
    with pytest.raises(ValueError, match="BF16 outputs of 8 heads of 96, 2 of K and V"):
        attend._check(step(), ROOM)


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (AttentionKind(80), r"expected heads of \(64, 96, 128, 256\), found 80"),
        (AttentionKind(window=0), "expected a window of at least one token, found 0"),
    ],
)
def test_other_kinds_of_attention_are_refused(kind: AttentionKind, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        DecodeAttention(8, 2, 1, torch.device("cpu"), kind=kind)


SEEN = {
    "window": (AttentionKind(64, window=5), None),
    "a window longer than contexts": (AttentionKind(64, window=99), None),
    "soft cap": (AttentionKind(64, soft_cap=2.0), None),
    "sinks": (AttentionKind(64, sinks=True), torch.tensor([0.5, -1, 2, 0]).bfloat16()),
    "all": (AttentionKind(64, window=5, soft_cap=2.0, sinks=True), torch.tensor([0.5, -1, 2, 0]).bfloat16()),
}


@pytest.mark.parametrize(("kind", "sinks"), SEEN.values(), ids=SEEN)
def test_the_reference_is_attention_token_by_token(kind: AttentionKind, sinks: Tensor | None) -> None:
    noise = torch.Generator().manual_seed(0)
    cache = torch.randn(3, 2, 16, 128, generator=noise).bfloat16()
    query = 3 * torch.randn(1, 4, 64, generator=noise).bfloat16()
    length, one = 37, torch.ones(1)
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32)
    out = decode_attention_reference(
        query, cache, table, torch.tensor([length]), (one, one, one), 0.125, kind, sinks
    )
    for head in range(4):
        total, weighed = 0.0, torch.zeros(64, dtype=torch.double)
        if sinks is not None:
            total += math.exp(float(sinks[head]))
        for token in range(length):
            if kind.window is not None and token <= length - 1 - kind.window:
                continue
            key, value = cache[table[0, token // 16].long(), head // 2, token % 16].double().split(64)
            score = float(query[0, head].double() @ key) * 0.125
            if kind.soft_cap:
                score = kind.soft_cap * math.tanh(score / kind.soft_cap)
            total += math.exp(score)
            weighed += math.exp(score) * value
        torch.testing.assert_close(out[0, head], weighed / total)
