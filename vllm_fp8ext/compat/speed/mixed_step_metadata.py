# SPDX-License-Identifier: Apache-2.0
"""What attention is told of a step with prompts that one CUDA graph holds, captured with some requests and replayed with any:
which of them decode, and what is left to FlashAttention, always in the same place.

Replaces `DefaultModelState.prepare_attn`, which does not tell whoever makes the metadata that a graph holds it. Can go once
FlashAttention's metadata keeps requests that decode apart, as other backends' does.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.config import CUDAGraphMode

from vllm_fp8ext.compat.wrapping import wrap

_APART, _ROOM = "fp8ext_whole", "fp8ext_room"
"""What is kept with a step's metadata: `Apart`; and with its builder: `_Room`."""
_is_one: ContextVar[bool] = ContextVar("fp8ext_is_whole", default=False)


class Apart(NamedTuple):
    """A step's first requests, each with one token, and the others."""

    lengths_R: Tensor
    """int32, tokens in the contexts of the former; in a whole step 0 of the others."""
    prompts: Any
    """Metadata of the latter: their tokens are where they were."""


class _Room(NamedTuple):
    """What graphs read, of up to so many requests."""

    lengths_R: Tensor
    """As in `Apart`."""
    prompt_starts: Tensor
    """Where tokens of prompts begin; requests that decode have none."""


def install() -> None:
    """Have metadata that is made from now on be that of such steps, where a graph holds it. Idempotent."""
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    wrap(DefaultModelState, "prepare_attn", _telling)


def is_one() -> bool:
    """Whether a graph holds the step whose metadata is made now."""
    return _is_one.get()


def apart(metadata: Any) -> Apart | None:
    """What two kernels attend to, each its part, if the metadata is that of such a step."""
    found: Apart | None = getattr(metadata, _APART, None)
    return found


def build(builder: Any, step: Any, count: int, make: Callable[[Any], Any]) -> Any:
    """Metadata of such a step, whose first `count` requests decode. `make`: vLLM's, of the step that it is given. There is a
    schedule for prompts alone: who attends to all of it with FlashAttention leaves it to that."""
    room: _Room | None = getattr(builder, _ROOM, None)
    if room is None:
        requests, device = builder.vllm_config.scheduler_config.max_num_seqs, step.seq_lens.device
        with torch.inference_mode(mode=False):
            sizes = requests, requests + 1
            room = _Room(*(torch.zeros(size, dtype=torch.int32, device=device) for size in sizes))
        setattr(builder, _ROOM, room)
    lengths, starts = room.lengths_R[: step.num_reqs], room.prompt_starts[: step.num_reqs + 1]
    lengths[:count].copy_(step.seq_lens[:count])
    lengths[count:].zero_()
    torch.clamp(step.query_start_loc, min=count, out=starts)
    prompts = make(dataclasses.replace(step, query_start_loc=starts))
    metadata = dataclasses.replace(prompts, query_start_loc=step.query_start_loc, scheduler_metadata=None)
    setattr(metadata, _APART, Apart(lengths, prompts))
    return metadata


@contextlib.contextmanager
def _one(*, is_so: bool) -> Iterator[None]:
    kept = _is_one.set(is_so)
    try:
        yield
    finally:
        _is_one.reset(kept)


def _telling(original: Any) -> Any:
    def prepare_attn(
        self: Any,
        input_batch: Any,
        cudagraph_mode: CUDAGraphMode,
        block_tables: Any,
        slot_mappings: Any,
        attn_groups: Any,
        kv_cache_config: Any,
        for_capture: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        given = (
            input_batch,
            cudagraph_mode,
            block_tables,
            slot_mappings,
            attn_groups,
            kv_cache_config,
            for_capture,
        )
        with _one(is_so=for_capture or cudagraph_mode == CUDAGraphMode.FULL):
            return original(self, *given, *args, **kwargs)

    return prepare_attn
