# SPDX-License-Identifier: Apache-2.0
"""What attention is told of a step that one graph holds."""

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata, FlashAttentionMetadataBuilder
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from vllm_fp8ext.compat.speed import decode_prefill_split, mixed_full_cudagraph, mixed_step_metadata

from .metadata_builder import Builder

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE


def whole_step(
    starts: list[int], lengths: list[int], tokens: int, most: int | None = None
) -> CommonAttentionMetadata:
    """Padded, as for a graph of so many tokens; `most`: of one request, as it is promised."""
    return CommonAttentionMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        query_start_loc_cpu=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        num_reqs=len(lengths),
        num_actual_tokens=tokens,
        max_query_len=most or max(b - a for a, b in itertools.pairwise(starts)),
        max_seq_len=max(lengths),
        block_table_tensor=torch.zeros(len(lengths), 2, dtype=torch.int32),
        slot_mapping=torch.zeros(tokens),
        seq_lens_cpu_upper_bound=torch.tensor(lengths),
    )


class Built(NamedTuple):
    """What vLLM's own function is given, and how often it may split a context."""

    step: CommonAttentionMetadata
    fast: bool
    splits: int
    tokens: int


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Built]:
    seen: list[Built] = []

    def build(self: Any, prefix: int, step: Any, fast: bool = False) -> FlashAttentionMetadata:
        seen.append(Built(step, fast, self.max_num_splits, self.max_cudagraph_size))
        return FlashAttentionMetadata(
            num_actual_tokens=step.num_actual_tokens,
            max_query_len=step.max_query_len,
            query_start_loc=step.query_start_loc,
            max_seq_len=step.max_seq_len,
            seq_lens=step.seq_lens,
            block_table=step.block_table_tensor,
            slot_mapping=step.slot_mapping,
            scheduler_metadata=torch.ones(5),
        )

    monkeypatch.setattr(FlashAttentionMetadataBuilder, "build", build)
    decode_prefill_split.install()
    return seen


def made(builder: Any, step: CommonAttentionMetadata) -> Any:
    with mixed_step_metadata.making(is_one=True):
        return FlashAttentionMetadataBuilder.build(builder, 0, step)


def test_a_graph_reads_which_requests_decode(built: list[Built]) -> None:
    """From where it was captured with it; FlashAttention is told of the others, whatever contexts those that decode have."""
    builder: Any = Builder(True, True)
    builder.max_num_splits, builder.max_cudagraph_size = 32, 5
    places = set()
    for step, decoding, prompts in (
        # as graphs are captured: as many requests as fit, of which some have a token more, or none
        (whole_step([0, 1, 2], [1, 1], 2, most=2), [0, 0], [0, 1, 2]),
        (whole_step([0, 1, 2, 4, 6], [1, 1, 2, 2], 6, most=6), [1, 1, 0, 0], [2, 2, 2, 4, 6]),
        (whole_step([0, 1, 2, 3, 4, 5, 6, 7, 8], [1] * 8, 8, most=8), [0] * 8, list(range(9))),
        # and replayed
        (whole_step([0, 1, 2, 5, 8], [9000, 7, 3, 60], 8), [9000, 7, 0, 0], [2, 2, 2, 5, 8]),
        (whole_step([0, 1, 5, 8, 8], [7, 4, 3, 0], 8), [7, 0, 0, 0], [1, 1, 5, 8, 8]),
        (whole_step([0, 4, 5, 8, 8], [4, 44, 3, 0], 8), [0, 0, 0, 0], [0, 4, 5, 8, 8]),
    ):
        starts = step.query_start_loc.tolist()
        metadata = made(builder, step)
        apart = mixed_step_metadata.apart(metadata)
        assert apart is not None
        assert apart.lengths_R.tolist() == decoding
        assert apart.prompts.query_start_loc.tolist() == prompts
        assert apart.lengths_R.dtype == apart.prompts.query_start_loc.dtype == torch.int32
        places.add((apart.lengths_R.data_ptr(), apart.prompts.query_start_loc.data_ptr()))
        told = built.pop()
        assert told.step.query_start_loc is apart.prompts.query_start_loc, "its schedule is of the same"
        assert (told.fast, told.splits, told.tokens) == (False, 1, step.num_actual_tokens)
        assert not decode_prefill_split.mixes(metadata)
        assert metadata.query_start_loc.tolist() == starts, "of all requests"
        assert metadata.scheduler_metadata is None, "that is of prompts"
        assert apart.prompts.scheduler_metadata is not None
    assert len(places) == 1
    assert (builder.max_num_splits, builder.max_cudagraph_size) == (32, 5)


@pytest.mark.parametrize(
    ("builder", "starts", "is_so"),
    [
        (Builder(True), [0, 1, 8], False),
        (Builder(True), [0, 1, 2], True),
        (Builder(True, False), [0, 1, 8], True),
        (Builder(True, graphs=CUDAGraphMode.FULL), [0, 1, 8], True),
    ],
    ids=["pieces", "decode alone", "others' layers", "graphs of any step"],
)
def test_other_steps_are_as_vllm_makes_them(
    builder: Any, starts: list[int], is_so: bool, built: list[Built]
) -> None:
    builder.max_num_splits, builder.max_cudagraph_size = 32, 5
    step = whole_step(starts, [5, 5000], starts[-1])
    with mixed_step_metadata.making(is_one=is_so):
        metadata = FlashAttentionMetadataBuilder.build(builder, 0, step)
    assert mixed_step_metadata.apart(metadata) is None
    ((told, _, *splits),) = built
    assert told is step
    assert splits == [32, 5]


@pytest.mark.parametrize(
    ("mode", "captured", "whole"),
    [(FULL, False, True), (FULL, True, True), (CUDAGraphMode.NONE, True, True), (PIECEWISE, False, False)],
)
@pytest.mark.parametrize("by_name", [True, False])
def test_attention_is_told_what_a_graph_holds(
    mode: CUDAGraphMode, captured: bool, whole: bool, by_name: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its metadata is made, no longer."""
    seen: list[Any] = []

    def prepare_attn(*given: Any, **named: Any) -> str:
        seen.append((mixed_step_metadata.is_one(), given[1:], named))
        return "metadata"

    monkeypatch.setattr(DefaultModelState, "prepare_attn", prepare_attn)
    mixed_full_cudagraph.install()
    state = object.__new__(DefaultModelState)
    given: Any = ("batch", mode, "tables", "slots", "groups", "config")
    if by_name:
        made: Any = state.prepare_attn(*given, for_capture=captured, ubatch_idx=3)
    else:
        made = state.prepare_attn(*given, captured, ubatch_idx=3)
    assert made == "metadata"
    assert seen == [(whole, (*given, captured), {"ubatch_idx": 3})]
    assert not mixed_step_metadata.is_one()
