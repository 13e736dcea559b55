# SPDX-License-Identifier: Apache-2.0
"""Attention over an FP8 or a BF16 cache on a Hopper GPU, against the same in fp64."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from vllm_fp8ext.kernels.attention import decode_attention
from vllm_fp8ext.kernels.attention.decode_attention import (
    AttentionKind,
    DecodeAttention,
    DecodeStep,
    decode_attention_reference,
)
from vllm_fp8ext.kernels.attention.kv_cache import quantize
from vllm_fp8ext.kernels.numerics import quantized
from vllm_fp8ext.kernels.numerics.reference import FP8_DTYPE, ScaleFormat

from . import windowed_models
from .modes import apart, told

pytestmark = pytest.mark.gpu

BOTH = pytest.mark.parametrize("dtype", [FP8_DTYPE, torch.bfloat16], ids=["FP8", "BF16"])

SHAPES = {
    "8B": (32, 8),
    "30B-A3B": (32, 4),
    "1.7B": (16, 8),
    "one": (4, 1),
    "wide": (32, 2),
    "odd": (24, 12),
    "seven": (28, 7),
}
"""Query heads and KV heads."""
PLAIN = AttentionKind()
KINDS = {
    "Llama-3.2-1B": (32, 8, AttentionKind(64)),
    "Qwen2.5-0.5B": (14, 2, AttentionKind(64)),
    "SmolLM": (9, 3, AttentionKind(64)),
    "gpt-oss, a window": (64, 8, AttentionKind(64, window=128, sinks=True)),
    "gpt-oss": (64, 8, AttentionKind(64, sinks=True)),
    "Phi-3": (32, 32, AttentionKind(96, window=2047)),
    "OLMo-3": (32, 32, AttentionKind(window=4096)),
    "Gemma-2-27B": (32, 16, AttentionKind(window=4096, soft_cap=50.0)),
    "Gemma-2-9B": (16, 8, AttentionKind(256, soft_cap=50.0)),
    "Gemma-3-1B": (4, 1, AttentionKind(256, window=512)),
    "Qwen3.5-27B": (24, 4, AttentionKind(256)),
    "Qwen3.5-122B-A10B": (32, 2, AttentionKind(256)),
    "all": (16, 8, AttentionKind(256, window=33, soft_cap=3.0, sinks=True)),
}
"""Query heads, KV heads and what attention is like."""
TOKENS = 24
"""Of the longest answer in `attention_scenario.py`."""
PROMPTS = 6
"""That it begins with at once."""


class Batch(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    cache: Tensor
    """The newest tokens are NaN in it."""
    table: Tensor
    lengths: Tensor
    slots: Any
    """A tensor, or None."""
    scales: tuple[Tensor, Tensor, Tensor]
    softmax_scale: float
    sinks: Tensor | None

    def run(self, attend: DecodeAttention) -> Tensor:
        out = torch.full(self.query.shape, torch.nan, dtype=torch.bfloat16, device="cuda")
        attend(DecodeStep(*self), out)
        return out

    def joined(self) -> Tensor:
        """The cache with the newest tokens in it."""
        cache = self.cache.view(torch.uint8).clone().view(self.cache.dtype)
        size, codes = cache.shape[2], [self.key, self.value]
        if cache.dtype == FP8_DTYPE:
            pairs = zip(codes, self.scales[1:], strict=True)
            codes = [quantize(part.float(), scale) for part, scale in pairs]
        for row, slot in enumerate(self.slots.tolist()):
            if slot >= 0:
                cache[slot // size, :, slot % size] = torch.cat([part[row] for part in codes], -1)
        return cache

    def lend(self, lender: int, borrowers: list[int]) -> "Batch":
        """The lender's last block, which its new token completes, stands first in the contexts of others too."""
        table = self.table.clone()
        block = table[lender, (int(self.lengths[lender]) - 1) // self.cache.shape[2]]
        table[borrowers, 0] = block
        return self._replace(table=table)

    def only(self, rows: list[int]) -> "Batch":
        fields = ("query", "key", "value", "table", "lengths", "slots")
        return self._replace(**{name: getattr(self, name)[rows] for name in fields})


def spoil(cache: Tensor, block: int, token: int) -> None:
    """Make a token of the cache NaN."""
    codes = cache.dtype == FP8_DTYPE
    cache.view(torch.uint8 if codes else torch.int16)[block, :, token] = 0x7F if codes else 0x7FC0


def batch(
    heads: int,
    kv_heads: int,
    lengths: list[int],
    kind: AttentionKind = PLAIN,
    *,
    block: int = 16,
    by_head: bool = False,
    near: bool = True,
    seed: int = 0,
    dtype: torch.dtype = FP8_DTYPE,
) -> Batch:
    """Blocks anywhere in the cache; `near`: a block's tokens side by side, as vLLM's layout NHD has them.

    What lies before the window is NaN, as a block that vLLM took back may be.
    """
    plain, head_size = dtype != FP8_DTYPE, kind.head_size
    noise = torch.Generator("cuda").manual_seed(seed)
    blocks = [-(-length // block) for length in lengths]
    total = sum(blocks) + 3
    size = (total, block, kv_heads, 2 * head_size) if near else (total, kv_heads, block, 2 * head_size)
    values = torch.randn(size, generator=noise, device="cuda")
    cache = (values * (1 if plain else 20)).to(dtype)
    cache = cache.transpose(1, 2) if near else cache
    order = torch.randperm(total, generator=noise, device="cuda").int()
    table = torch.zeros(len(lengths), max(1, *blocks) + 2, dtype=torch.int32, device="cuda")
    used = 0
    for row, count in zip(table, blocks, strict=True):
        row[:count] = order[used : used + count]
        used += count
    query = torch.randn(len(lengths), heads, head_size, generator=noise, device="cuda")
    fused = torch.randn(len(lengths), 2, kv_heads, head_size, generator=noise, device="cuda").bfloat16()
    slots = torch.tensor(
        [
            int(row[(n - 1) // block]) * block + (n - 1) % block if n else -1
            for row, n in zip(table, lengths, strict=True)
        ],
        device="cuda",
    )
    for slot in slots[slots >= 0].tolist():
        spoil(cache, slot // block, slot % block)
    for row, length in zip(table.tolist(), lengths, strict=True):
        for token in range(length - kind.window if kind.window else 0):
            spoil(cache, row[token // block], token % block)
    sinks = torch.randn(heads, generator=noise, device="cuda").bfloat16() if kind.sinks else None
    count = kv_heads if by_head else 1
    scales = tuple(torch.rand(count, generator=noise, device="cuda") * 0.02 + 0.02 for _ in range(3))
    if plain:
        scales = (torch.ones(count, device="cuda"),) * 3
    result = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    return Batch(
        *(
            (query * (1 if plain else 40)).to(dtype),
            fused[:, 0],
            fused[:, 1],
            cache,
            table,
            result,
            slots,
            scales,
        ),
        head_size**-0.5,
        sinks,
    )


def error(output: Tensor, given: Batch, kind: AttentionKind | None = None) -> float:
    shown = (given.query, given.joined(), given.table, given.lengths, given.scales, given.softmax_scale)
    expected = decode_attention_reference(*shown, kind, given.sinks)
    assert bool(output.isfinite().all())
    return float((output.double() - expected).norm() / expected.norm())


def same(first: Tensor, second: Tensor) -> bool:
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))


@BOTH
@pytest.mark.parametrize("by_head", [False, True], ids=["layer", "head"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_is_softmax_attention(shape: tuple[int, int], by_head: bool, dtype: torch.dtype) -> None:
    """Requests in one share and in many, of one token, of a whole number of tiles and of others."""
    for lengths in ([1], [16], [4097], [1, 17, 300, 31, 32, 1000, 2, 2049], [5] * 300, [700, 900, 1100] * 60):
        given = batch(*shape, lengths, by_head=by_head, dtype=dtype)
        attend = DecodeAttention(*shape, len(lengths), torch.device("cuda"), dtype)
        expected = given.joined()
        assert error(given.run(attend), given) < 4e-3, lengths[:8]
        assert same(given.cache, expected)


@BOTH
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_heads_of_other_sizes_windows_soft_caps_and_sinks(
    kind: tuple[int, int, AttentionKind], dtype: torch.dtype
) -> None:
    heads, kv_heads, like = kind
    for lengths, block, near in (
        ([1], 16, True),
        ([4097], 16, False),
        ([1, 17, 300, 31, 32, 1000, 2, 2049], 48, True),
        ([5] * 100, 16, True),
        ([700, 900, 1100] * 20, 64, True),
    ):
        given = batch(heads, kv_heads, lengths, like, by_head=near, block=block, near=near, dtype=dtype)
        attend = DecodeAttention(heads, kv_heads, len(lengths), torch.device("cuda"), dtype, kind=like)
        expected = given.joined()
        first = given.run(attend)
        assert error(first, given, like) < 4e-3, lengths[:8]
        assert same(given.cache, expected)
        assert torch.equal(given.run(attend), first)


@BOTH
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_quantized_outputs_of_heads_of_other_sizes(
    kind: tuple[int, int, AttentionKind], dtype: torch.dtype
) -> None:
    """Bit for bit what quantizes BF16, or refused."""
    from vllm_fp8ext.kernels.quantize.quantize_activation import quantize_activation

    heads, kv_heads, like = kind
    lengths = [1, 17, 300, 0, 32, 1000, 2, 2049, 5]
    given = batch(heads, kv_heads, lengths, like, dtype=dtype)
    attend = DecodeAttention(heads, kv_heads, len(lengths), torch.device("cuda"), dtype, kind=like)
    room = quantized.empty(len(lengths), heads * like.head_size, torch.device("cuda"))
    if not attend.quantizes:
        with pytest.raises(ValueError, match="expected BF16 outputs"):
            attend(DecodeStep(*given), room)
        return
    expected = quantize_activation(given.run(attend).flatten(1), "fp32")
    room.codes.view(torch.uint8).fill_(0x7F)
    room.scales.fill_(torch.nan)
    attend(DecodeStep(*given), room)
    assert same(room.codes, expected.codes)
    assert torch.equal(room.scales, expected.scales)


@BOTH
def test_a_block_that_others_complete_is_read_through_a_window(dtype: torch.dtype) -> None:
    like = AttentionKind(64, window=40)
    lengths = [16 * 5, 17, 16 * 4 + 5, 3, *[16 * 4] * 40]
    given = batch(32, 8, lengths, like, dtype=dtype)
    table = given.table.clone()
    table[2, 2] = table[0, 4]  # tokens 32 to 47, which the window from 29 on has
    given = given._replace(table=table)
    attend = DecodeAttention(32, 8, len(lengths), torch.device("cuda"), dtype, kind=like)
    expected = given.joined()
    assert error(given.run(attend), given, like) < 4e-3
    assert same(given.cache, expected)


@BOTH
@pytest.mark.parametrize("near", [False, True], ids=["HND", "NHD"])
@pytest.mark.parametrize("block", [16, 48, 128])
def test_blocks_of_any_size_and_either_layout(block: int, near: bool, dtype: torch.dtype) -> None:
    given = batch(32, 8, [1, 200, 128, 3000, 47], block=block, near=near, dtype=dtype)
    attend = DecodeAttention(32, 8, 8, torch.device("cuda"), dtype)
    expected = given.joined()
    assert error(given.run(attend), given) < 4e-3
    assert same(given.cache, expected)


@BOTH
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("block", [16, 64])
def test_a_block_that_is_completed_in_this_step_is_read_by_others(
    block: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """The token that completes it is not in the cache when the kernel begins, and not always when a share reads it."""
    lengths = [block * 5, block + 1, block * 9 - 3, 3, *[block * 4] * 40, block * 300, *[block * 3 + 1] * 40]
    given = batch(*shape, lengths, block=block, dtype=dtype)
    given = given.lend(0, [1, 2]).lend(7, [44]).lend(9, [*range(45, 85)])
    attend = DecodeAttention(*shape, len(lengths), torch.device("cuda"), dtype)
    before = given.cache.view(torch.uint8).clone()
    expected = given.joined()
    first = given.run(attend)
    assert error(first, given) < 4e-3
    assert same(given.cache, expected)
    for _ in range(20):
        given.cache.view(torch.uint8).copy_(before)
        assert torch.equal(given.run(attend), first)


def test_one_score_far_above_the_others() -> None:
    """Weights fall below what FP16 holds; the largest comes late, and early."""
    for at in (3, 900):
        given = batch(32, 8, [1000])
        cache = given.cache.float()
        cache[given.table[0, at // 16].long(), :, at % 16, :128] *= 8
        query = (given.query.float() * 3).clamp(-448, 448)
        given = given._replace(cache=cache.clamp(-448, 448).to(FP8_DTYPE), query=query.to(FP8_DTYPE))
        assert error(given.run(DecodeAttention(32, 8, 1, torch.device("cuda"))), given) < 4e-3


def test_padding_is_zero_and_what_lies_behind_a_context_is_not_read() -> None:
    given = batch(32, 8, [37, 0, 130, 0])
    cache = given.cache.view(torch.uint8).clone()
    last = given.table[0, 2].long()
    cache[last, :, 5:] = 0x7F  # NaN
    free = torch.ones(len(cache), dtype=torch.bool, device="cuda")
    free[given.table.flatten().long()] = False
    assert bool(free.any())
    cache[free] = 0x7F
    given = given._replace(cache=cache.view(FP8_DTYPE))
    out = given.run(DecodeAttention(32, 8, 4, torch.device("cuda")))
    assert not bool(out[1].any())
    assert not bool(out[3].any())
    assert error(out[[0, 2]], given.only([0, 2])) < 4e-3
    given.lengths.zero_()
    given.slots.fill_(-1)
    assert not bool(given.run(DecodeAttention(32, 8, 4, torch.device("cuda"))).any()), "of padding alone"


@BOTH
@pytest.mark.parametrize("form", ["fp32", "pow2"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_quantized_outputs_are_what_quantizes_bf16(
    shape: tuple[int, int], form: ScaleFormat, dtype: torch.dtype
) -> None:
    """Bit for bit, of requests in one share and in many, and of padding."""
    for lengths in ([4097], [1, 17, 300, 0, 32, 1000, 2, 2049, 5], [700, 900, 1100] * 60):
        given = batch(*shape, lengths, dtype=dtype)
        attend = DecodeAttention(*shape, len(lengths), torch.device("cuda"), dtype)
        from vllm_fp8ext.kernels.quantize.quantize_activation import quantize_activation

        expected = quantize_activation(given.run(attend).flatten(1), form)
        room = quantized.empty(len(lengths), shape[0] * 128, torch.device("cuda"))
        room.codes.view(torch.uint8).fill_(0x7F)
        room.scales.fill_(torch.nan)
        attend(DecodeStep(*given), room, form)
        assert same(room.codes, expected.codes), lengths[:8]
        assert torch.equal(room.scales, expected.scales)


def test_nan_of_one_request_stays_with_it() -> None:
    given = batch(32, 8, [500, 700])
    cache = given.cache.view(torch.uint8).clone()
    cache[given.table[0, 3].long(), :, 7] = 0x7F
    given = given._replace(cache=cache.view(FP8_DTYPE))
    out = given.run(DecodeAttention(32, 8, 2, torch.device("cuda")))
    assert bool(out[0].isnan().all())
    assert bool(out[1].isfinite().all())


def test_the_same_bits_again_and_in_a_graph_with_other_lengths() -> None:
    given = batch(32, 8, [700, 33, 2000, 1])
    attend = DecodeAttention(32, 8, 4, torch.device("cuda"))
    first = given.run(attend)
    assert all(torch.equal(given.run(attend), first) for _ in range(20))
    out = torch.empty_like(first)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(DecodeStep(*given), out)
    graph.replay()
    assert torch.equal(out, first)
    given.lengths.copy_(torch.tensor([20, 33, 1999, 0]))
    real = given.only([0, 1, 2])
    block = real.cache.shape[2]
    ends = [n - 1 for n in real.lengths.tolist()]
    slots = [int(row[n // block]) * block + n % block for row, n in zip(real.table, ends, strict=True)]
    given.slots.copy_(torch.tensor([*slots, -1]))
    graph.replay()
    assert error(out[:3], given.only([0, 1, 2])) < 4e-3


def test_a_token_without_a_slot_is_seen_and_not_cached() -> None:
    given = batch(32, 8, [700, 33])
    joined = given.joined()
    given.slots[1] = -1
    before = given.cache.view(torch.uint8).clone()
    out = given.run(DecodeAttention(32, 8, 2, torch.device("cuda")))
    row = given.table[1, 2].long()
    assert torch.equal(given.cache.view(torch.uint8)[row], before[row])
    shown = (given.query, joined, given.table, given.lengths, given.scales, given.softmax_scale)
    expected = decode_attention_reference(*shown)
    assert float((out - expected).norm() / expected.norm()) < 4e-3


@BOTH
def test_tokens_that_are_cached_already_are_not_cached_again(dtype: torch.dtype) -> None:
    """By a kernel ahead of this one, which this one waits for: so blocks that this step completes are there for others."""
    lengths = [16 * 5, 17, 16 * 9 - 3, 3, *[16 * 4] * 40]
    given = batch(32, 8, lengths, dtype=dtype).lend(0, [1, 2])
    attend = DecodeAttention(32, 8, len(lengths), torch.device("cuda"), dtype)
    expected = given.run(attend)
    block, token = divmod(int(given.slots[3]), 16)
    spoil(given.cache, block, token)  # nobody reads it: it comes from the step
    before = given.cache.view(torch.uint8).clone()
    for _ in range(20):
        assert torch.equal(given._replace(slots=None).run(attend), expected)
    assert torch.equal(given.cache.view(torch.uint8), before)


def test_what_joins_is_rounded_as_vllm_does() -> None:
    """Beyond the largest code, between two of them, zeros of both signs, NaN."""
    given = batch(32, 8, [20, 40])
    for part in (given.key, given.value):
        part[0, 0, :7] = torch.tensor([1e30, -1e30, 0.0, -0.0, 1e-30, torch.nan, 3.3]).bfloat16()
        part[1] = torch.arange(8 * 128, device="cuda").view(8, 128) / 100 - 5
    expected = given.joined()
    given.run(DecodeAttention(32, 8, 2, torch.device("cuda")))
    assert same(given.cache, expected)


@BOTH
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_tile_config(shape: tuple[int, int], dtype: torch.dtype) -> None:
    for stages in (2, 3) if dtype == torch.bfloat16 else (2, 3, 5):
        config = replace(decode_attention.choose(shape[1]), stages=stages)
        given = batch(*shape, [1, 17, 300, 1000], dtype=dtype)
        attend = DecodeAttention(*shape, 4, torch.device("cuda"), dtype, config)
        assert error(given.run(attend), given) < 4e-3, config


def test_refusals() -> None:
    given = batch(32, 8, [5, 6])
    attend = DecodeAttention(32, 8, 1, torch.device("cuda"))
    with pytest.raises(ValueError, match="expected 1 to 1 requests, found 2"):
        given.run(attend)
    with pytest.raises(ValueError, match="expected 1 to 16 query heads to a KV head, found 34 and 2"):
        DecodeAttention(34, 2, 1, torch.device("cuda"))
    attend = DecodeAttention(32, 8, 2, torch.device("cuda"))
    with pytest.raises(ValueError, match=r"queries .* in torch.float8_e4m3fn"):
        attend(DecodeStep(given.query.bfloat16(), *given[1:]), torch.empty(2, 32, 128, device="cuda"))


def test_in_a_real_engine(tmp_path: Path) -> None:
    """Eager, each call is right for what vLLM gives it, also where one request reads what another one's new token completes;
    whole CUDA graphs and piecewise ones say the same, also where steps with prompts replay them, FlashAttention nearly."""
    from vllm_fp8ext.bench.generated import write_checkpoint

    write_checkpoint(tmp_path / "model", "Qwen3-0.6B", 0, "cuda")
    modes = (
        *("eager", "graphs", "longer", "short", "pieces", "whole", "unquantized", "flash"),
        *("plain", "plain eager", "plain flash"),
    )
    result = told("attention_scenario.py", modes, tmp_path / "model", tmp_path)
    eager, graphs, longer, short, pieces, whole, unquantized, flash, plain, plain_eager, plain_flash = result
    for one in (eager, plain_eager):
        assert one["calls"] - one["at start"] >= 28 * (TOKENS - 1)
        assert one["error"] < 4e-3
        assert one["joined"]
        assert one["lent"] == 28
        assert len(one["cached by vLLM"]) >= 28 * 2
        assert min(one["cached by vLLM"]) > PROMPTS, "tokens: never of steps that decode alone"
    assert eager["mixed"] == graphs["mixed"] == longer["mixed"] == pieces["mixed"] >= 28 * 3
    assert graphs["at start"] >= 28 * 4
    assert graphs["calls"] == graphs["at start"] + graphs["mixed"], "decoding alone is replayed"
    assert pieces["calls"] - pieces["at start"] >= 28 * (TOKENS - 1)
    assert flash["calls"] == plain_flash["calls"] == 0
    for one in (graphs, pieces, plain):
        assert min(one["scheduled"]) > 1, "tokens of a request: never for steps that decode alone"
    assert min(flash["scheduled"]) == min(whole["scheduled"]) == 1, "graphs of any step hold FlashAttention"
    assert (plain["at start"], plain["mixed"]) == (graphs["at start"], graphs["mixed"])
    for one in (graphs, longer, pieces, plain):
        assert one["quantized"] == one["calls"]
    assert eager["quantized"] == unquantized["quantized"] == 0, "no graph has room for it"
    assert unquantized["calls"] == graphs["calls"]
    assert graphs["launched"] >= 28 * 4 * 3
    assert longer["launched"] == 0
    assert len(short["cached by vLLM"]) == 28 * 2, (
        "in the steps of the two longest prompts, which are in pieces"
    )
    assert short["mixed"] == 28, "the first of these has a prompt of which all but a token is cached"
    assert short["launched"] == 0
    assert min(short["scheduled"]) > 1
    assert graphs["logprobs"] == pieces["logprobs"]
    assert longer["logprobs"] == graphs["logprobs"]
    # a step that is compiled rounds elsewhere than an eager one; another kernel makes no more of a difference
    assert apart(flash, graphs) < 1.5 * apart(eager, graphs)
    assert apart(short, graphs) < 0.1 * apart(eager, graphs), "by the same kernels"
    assert apart(unquantized, graphs) < 1.5 * apart(eager, graphs)
    assert apart(flash, whole) < 1.5 * apart(eager, graphs)
    assert apart(plain_flash, plain) < 1.5 * apart(eager, graphs)


@pytest.mark.parametrize("name", windowed_models.MODELS)
def test_in_an_engine_whose_layers_have_windows(name: str, tmp_path: Path) -> None:
    """Soft caps or sinks too, heads of other sizes, and block tables of their own for layers with a window.

    FlashAttention 3 says the same, nearly.
    """
    windowed_models.write(name, tmp_path / "model")
    modes = ("plain eager", "plain", "plain flash")
    if name != "gpt-oss":  # FlashAttention reads no FP8 beside sinks
        modes += "eager", "graphs", "flash", "short"
    of = dict(zip(modes, told("attention_scenario.py", modes, tmp_path / "model", tmp_path), strict=True))
    for mode in modes:
        one = of[mode]
        if mode.endswith("flash"):
            assert one["calls"] == 0
            continue
        if mode.endswith("eager"):
            assert one["calls"] - one["at start"] >= windowed_models.LAYERS * (TOKENS - 1)
            assert one["error"] < 4e-3
            assert one["joined"]
            continue
        assert one["reused"] > TOKENS // 2, "steps, of all block tables"
        if mode == "short":  # prompts too, but for the longest two
            assert apart(of["graphs"], one) < 0.5 * apart(of["eager"], one) + 0.01
            continue
        assert one["calls"] == one["at start"] + one["mixed"], "decoding alone is replayed"
        assert one["mixed"] > 0
        flash, eager = ("plain flash", "plain eager") if mode == "plain" else ("flash", "eager")
        assert apart(of[flash], one) < 1.5 * apart(of[eager], one) + 0.01
