# SPDX-License-Identifier: Apache-2.0
"""With how many requests of one token a step begins, and what FlashAttention is told of the others."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata, FlashAttentionMetadataBuilder

from vllm_fp8ext.compat.speed import decode_prefill_split

from .metadata_builder import Builder


@pytest.mark.parametrize(
    ("starts", "longest", "single"),
    [
        ([0, 1, 2, 6, 7, 7], 4, 2),
        ([0, 4, 5], 4, None),
        ([0, 1, 2, 3, 3], 2, 3),
        ([0, 1, 2], 2, None),
        ([0, 1, 2], 1, None),
    ],
)
@pytest.mark.parametrize("upto", [None, 10_000])
@pytest.mark.parametrize("ahead", [True, False])
def test_with_how_many_of_one_token_a_step_begins(
    starts: list[int],
    longest: int,
    single: int | None,
    upto: int | None,
    ahead: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Told where others follow alone; behind the requests of a batch lie starts of no request."""
    count = len(starts) - 1
    built = FlashAttentionMetadata(
        num_actual_tokens=starts[-1],
        max_query_len=longest,
        query_start_loc=torch.tensor(starts),
        max_seq_len=77,
        seq_lens=torch.arange(count) + 50,
        block_table=torch.zeros(count, 2),
        slot_mapping=torch.zeros(starts[-1]),
        scheduler_metadata=torch.zeros(5) if ahead else None,
        max_num_splits=3,
    )
    monkeypatch.setattr(FlashAttentionMetadataBuilder, "build", lambda *_, **__: built)
    decode_prefill_split.install()
    build = FlashAttentionMetadataBuilder.build
    decode_prefill_split.install()
    assert FlashAttentionMetadataBuilder.build is build
    step = SimpleNamespace(
        max_query_len=longest,
        num_reqs=count,
        query_start_loc_cpu=torch.tensor([*starts, 99, 99], dtype=torch.int32),
        seq_lens_cpu_upper_bound=None if upto is None else torch.full((count,), upto),
    )
    assert build(Builder(True), 0, step, fast_build=True) is built  # type: ignore[arg-type]  # all that is asked
    result = getattr(built, decode_prefill_split._SINGLE, None)
    assert (result and result.requests) == single
    if not result:
        return
    assert (result.schedule is not None) == ahead
    if ahead:
        assert result.schedule.pop("cu_query_lens").tolist() == starts[result.requests :]
        assert result.schedule.pop("seqlens").tolist() == [50 + row for row in range(result.requests, count)]
        assert result.schedule == {
            "aot_schedule": True,
            "batch_size": count - result.requests,
            "max_query_len": longest,
            "max_seq_len": 77,
            "causal": True,
            "max_num_splits": 3,
        }


@pytest.mark.parametrize(
    ("longest", "builder", "fast", "unasked"),
    [
        (1, Builder(True, True), False, True),
        (1, Builder(True, False), False, False),
        (1, Builder(True, False), True, True),
        (2, Builder(True, True), False, False),
        (2, Builder(True, True), True, True),
        (1, Builder(True, graphs=CUDAGraphMode.FULL), False, False),
        (1, Builder(True, graphs=CUDAGraphMode.FULL_DECODE_ONLY), False, True),
        (1, Builder(True, graphs=CUDAGraphMode.PIECEWISE), False, True),
        (1, Builder(True, graphs=CUDAGraphMode.NONE), False, True),
        (1, Builder(True, drafts="drafts"), False, False),
    ],
)
def test_no_schedule_for_what_flash_attention_does_not_compute(
    longest: int, builder: Any, fast: bool, unasked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for graphs that hold FlashAttention of any step."""
    asked: list[bool] = []
    monkeypatch.setattr(
        FlashAttentionMetadataBuilder, "build", lambda *given: asked.append(given[3]) or SimpleNamespace()
    )
    decode_prefill_split.install()
    step = SimpleNamespace(
        max_query_len=longest,
        num_reqs=1,
        query_start_loc_cpu=torch.tensor([0, longest]),
        seq_lens_cpu_upper_bound=None,
    )
    for _ in range(2):
        FlashAttentionMetadataBuilder.build(builder, 0, step, fast_build=fast)  # type: ignore[arg-type]  # all that is asked
    assert asked == [unasked] * 2
    builder.aot_sliding_window = None
    FlashAttentionMetadataBuilder.build(builder, 0, step, fast_build=fast)  # type: ignore[arg-type]  # all that is asked
    assert asked[2:] == [fast], "vLLM finds out about windows in its first build"


def test_few_short_contexts_stay_with_flash_attention() -> None:
    step = SimpleNamespace(
        max_query_len=4,
        num_reqs=3,
        query_start_loc_cpu=torch.tensor([0, 1, 2, 6]),
        seq_lens_cpu_upper_bound=torch.tensor([8000, 8384, 99]),
    )
    assert decode_prefill_split._leading(step) == 2
    step.seq_lens_cpu_upper_bound[0] -= 1
    assert decode_prefill_split._leading(step) == 0


def test_another_block_table_is_cut_anew(mixed: FlashAttentionMetadata) -> None:
    """vLLM copies metadata for layers that share all but the table."""
    other = FlashAttentionMetadataBuilder.update_block_table(
        None,  # type: ignore[arg-type]  # is not asked
        mixed,
        mixed.block_table + 10,
        mixed.slot_mapping,
    )
    for metadata in (mixed, other):
        prompts = decode_prefill_split.apart(metadata).prompts
        assert prompts.block_table.tolist() == metadata.block_table[2:].tolist()


@pytest.mark.parametrize(
    ("starts", "longest", "lengths", "builder", "splits"),
    [
        ([0, 5, 7], 2, [2, 4096], Builder(True), (1, 7)),
        ([0, 5, 7], 2, [2, 4097], Builder(True), (32, 5)),
        ([0, 5, 7], 1, [2, 4096], Builder(True), (32, 5)),
        ([0, 5, 7], 2, [2, 4096], Builder(True, False), (32, 5)),
        ([0, 5, 7], 2, [2, 4096], Builder(True, graphs=CUDAGraphMode.FULL), (32, 5)),
        ([0, 5, 7], 2, None, Builder(True), (32, 5)),
        ([0, 1, 7], 6, [20_000, 4096], Builder(True), (1, 7)),
        ([0, 1, 7], 6, [20_000, 4097], Builder(True), (32, 5)),
        ([0, 1, 7], 6, [5000, 4096], Builder(True), (32, 5)),
    ],
)
def test_short_contexts_are_not_split(
    starts: list[int],
    longest: int,
    lengths: list[int] | None,
    builder: Any,
    splits: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of what FlashAttention takes beside prompts, by a builder all of whose layers are ours; it stays as it was, also where
    building fails."""
    seen: list[tuple[int, int]] = []

    def build(self: Any, *_: Any) -> Any:
        seen.append((self.max_num_splits, self.max_cudagraph_size))
        raise ValueError("any")

    monkeypatch.setattr(FlashAttentionMetadataBuilder, "build", build)
    decode_prefill_split.install()
    builder.max_num_splits, builder.max_cudagraph_size = 32, 5
    step = SimpleNamespace(
        max_query_len=longest,
        num_actual_tokens=7,
        num_reqs=2,
        query_start_loc_cpu=torch.tensor(starts),
        seq_lens_cpu_upper_bound=None if lengths is None else torch.tensor(lengths),
    )
    with pytest.raises(ValueError, match="any"):
        FlashAttentionMetadataBuilder.build(builder, 0, step)  # type: ignore[arg-type]  # all that is asked
    assert seen == [splits]
    assert (builder.max_num_splits, builder.max_cudagraph_size) == (32, 5)
