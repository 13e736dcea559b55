# SPDX-License-Identifier: Apache-2.0
"""Takes a step's metadata apart: requests with one new token, which a batch begins with, and others.

FlashAttention's schedule is made for none but those that it computes, and does not split short contexts.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

from vllm_fp8ext.compat.speed import mixed_step_metadata
from vllm_fp8ext.compat.speed.mixed_step_metadata import Apart
from vllm_fp8ext.compat.wrapping import wrap

FEATURE: str = "decode_attention"
WHY: str = (
    "Leave prompts alone to FlashAttention: its builder forgets how many tokens requests "
    "have, and makes a schedule for all."
)
GAIN: str = "see decode_attention"
REPLACES: tuple[str, ...] = (
    "vllm.v1.attention.backends.flash_attn:FlashAttentionMetadataBuilder.build("
    "common_prefix_len, common_attn_metadata, fast_build)",
)
USES: dict[str, tuple[str, ...]] = {
    "decode by our own attention kernel": (
        "vllm.v1.attention.backends.flash_attn:FlashAttentionMetadata("
        "num_actual_tokens, max_query_len, query_start_loc, seq_lens, block_table, slot_mapping, "
        "scheduler_metadata, max_seq_len, max_num_splits, causal)",
        "vllm.v1.attention.backends.flash_attn:FlashAttentionMetadataBuilder._get_scheduler_metadata("
        "aot_schedule, batch_size, cu_query_lens, max_query_len, seqlens, max_seq_len, causal, "
        "max_num_splits)",
        "vllm.v1.attention.backend:CommonAttentionMetadata("
        "query_start_loc, query_start_loc_cpu, seq_lens, num_reqs, max_query_len, num_actual_tokens, "
        "seq_lens_cpu_upper_bound)",
    ),
}
UPSTREAM: str = "https://github.com/vllm-project/vllm/pull/58013"
REMOVE_WHEN: str = "FlashAttention's metadata keeps requests that decode apart, as other backends' does"
GPU_ONLY: bool = True

_SINGLE, _APART = "fp8ext_single", "fp8ext_apart"
"""Attributes of vLLM's metadata of a step that begins with requests of one token: `_Single`, and `Apart`, which holds
for one block table.
"""
_TAKEN = "fp8ext_decodes"
"""The mark of a layer's implementation whose requests that decode are ours.

It also tells whether all of a builder's are.
"""
LEAST_TOKENS = 16384
"""In the contexts of these requests: with fewer FlashAttention, which is launched anyway, takes them along."""
SHORT = 4096
"""Tokens of a context that FlashAttention does not split: with prompts there is enough to do at once."""


def mixes(metadata: Any) -> bool:
    """Tell whether enough is read for requests of one token that a step begins with."""
    return hasattr(metadata, _SINGLE)


class _Single(NamedTuple):
    requests: int
    schedule: Tensor | None
    """FlashAttention's schedule of the other requests, computed once in a step."""


def apart(metadata: Any) -> Apart:
    """Once for all layers that share the metadata."""
    split: Apart | None = getattr(metadata, _APART, None)
    if split is None:
        count, schedule = getattr(metadata, _SINGLE)
        prompts = dataclasses.replace(
            metadata,
            query_start_loc=metadata.query_start_loc[count:],
            seq_lens=metadata.seq_lens[count:],
            block_table=metadata.block_table[count:],
            scheduler_metadata=schedule,
        )
        split = Apart(metadata.seq_lens[:count], prompts)
        setattr(metadata, _APART, split)
    return split


def install() -> None:
    """Have vLLM's metadata tell with how many requests of one token a step begins. Idempotent."""
    wrap(FlashAttentionMetadataBuilder, "build", _wrap_build)


def mark_decodes(implementation: Any) -> None:
    """Requests of a layer that decode are ours, if a step has no others."""
    setattr(implementation, _TAKEN, True)


def is_taken(layer: Any) -> bool:
    return hasattr(getattr(layer, "impl", None), _TAKEN)


def takes_all(builder: Any) -> bool:
    """Tell whether no layer that shares the metadata asks FlashAttention for requests that decode.

    One that does all the same computes its schedule itself. But a graph that was captured with other requests holds
    FlashAttention, and reads a schedule that every step has to renew: one of all steps, or of drafts too.
    """
    takes: bool | None = getattr(builder, _TAKEN, None)
    if takes is None:
        compilation = builder.vllm_config.compilation_config
        layers = compilation.static_forward_context
        alone = compilation.cudagraph_mode != CUDAGraphMode.FULL
        takes = alone and builder.vllm_config.speculative_config is None
        takes &= all(is_taken(layers[name]) for name in builder.layer_names)
        setattr(builder, _TAKEN, takes)
    return takes


def _wrap_build(original: Any) -> Any:
    def build_split(
        self: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        step = common_attn_metadata
        if step.max_query_len > 1 and mixed_step_metadata.is_one() and takes_all(self):
            with _unsplit(self, step):
                return mixed_step_metadata.build(
                    self, step, _singles(step), lambda one: original(self, common_prefix_len, one, fast_build)
                )
        count = _leading(step)
        # vLLM's first build finds out about windows
        unasked = step.max_query_len == 1 and self.aot_sliding_window is not None and takes_all(self)
        with _unsplit(self, step) if _is_short(self, step, count) else contextlib.nullcontext():
            metadata = original(self, common_prefix_len, step, fast_build or unasked)
        if count:
            setattr(metadata, _SINGLE, _Single(count, _schedule(self, metadata, count)))
        return metadata

    return build_split


def _is_short(builder: Any, step: Any, first: int) -> bool:
    """Tell whether the contexts that FlashAttention computes, from the `first` on, are short."""
    lengths = step.seq_lens_cpu_upper_bound
    known = step.max_query_len > 1 and lengths is not None
    return known and int(lengths[first:].max()) <= SHORT and takes_all(builder)


@contextlib.contextmanager
def _unsplit(builder: Any, step: Any) -> Iterator[None]:
    """Have FlashAttention compute a step's contexts in one part each: also what a graph is captured with, if one holds all of
    them."""
    kept = builder.max_num_splits, builder.max_cudagraph_size
    builder.max_num_splits, builder.max_cudagraph_size = 1, step.num_actual_tokens
    try:
        yield
    finally:
        builder.max_num_splits, builder.max_cudagraph_size = kept


def _singles(step: Any) -> int:
    """With how many requests of one token a step begins, if others follow. Looks at what lies on the CPU."""
    if step.max_query_len == 1:
        return 0
    longer = (step.query_start_loc_cpu[: step.num_reqs + 1].diff() != 1).nonzero()
    return int(longer[0]) if len(longer) else 0


def _leading(step: Any) -> int:
    """The same, if there is enough to read for them."""
    count, tokens = _singles(step), step.seq_lens_cpu_upper_bound
    too_short = count and tokens is not None and int(tokens[:count].sum()) < LEAST_TOKENS
    return 0 if too_short else count


def _schedule(builder: Any, metadata: Any, count: int) -> Tensor | None:
    if metadata.scheduler_metadata is None:
        return None
    schedule: Tensor | None = builder._get_scheduler_metadata(
        aot_schedule=True,
        batch_size=metadata.seq_lens.shape[0] - count,
        cu_query_lens=metadata.query_start_loc[count:],
        max_query_len=metadata.max_query_len,
        seqlens=metadata.seq_lens[count:],
        max_seq_len=metadata.max_seq_len,
        causal=metadata.causal,
        max_num_splits=metadata.max_num_splits,
    )
    return schedule
