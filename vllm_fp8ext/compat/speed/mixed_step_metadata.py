# SPDX-License-Identifier: Apache-2.0
"""Makes what attention is told of a step with prompts that one CUDA graph holds.

The graph is captured with some requests and replayed with any: the metadata says which of them decode, and what is left to
FlashAttention, always in the same place.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

FEATURE: str = "decode_attention"
WHY: str = (
    "Tell attention of a whole step in one graph: FlashAttention's metadata does not keep "
    "requests that decode apart."
)
GAIN: str = "see mixed_full_cudagraph"
REPLACES: tuple[str, ...] = ()
USES: dict[str, tuple[str, ...]] = {}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "FlashAttention's metadata keeps requests that decode apart, as other backends' does"
GPU_ONLY: bool = True

_APART, _ROOM = "fp8ext_whole", "fp8ext_room"
"""Attributes of a step's metadata: `Apart`; of its builder: `_Room`."""
_is_one: ContextVar[bool] = ContextVar("fp8ext_is_whole", default=False)


class Apart(NamedTuple):
    """A step's first requests, each with one token, and the others."""

    lengths_R: Tensor
    """int32, tokens in the contexts of the former; in a whole step 0 of the others."""
    prompts: Any
    """Metadata of the latter: their tokens are where they were."""


class _Room(NamedTuple):
    """Buffers that graphs read, of up to so many requests."""

    lengths_R: Tensor
    """As in `Apart`."""
    prompt_starts: Tensor
    """Starts of the tokens of prompts; requests that decode have none."""


def is_one() -> bool:
    """Tell whether a graph holds the step whose metadata is made now."""
    return _is_one.get()


def apart(metadata: Any) -> Apart | None:
    """Return what two kernels attend to, each its part, of such a step's metadata."""
    split: Apart | None = getattr(metadata, _APART, None)
    return split


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
def making(*, is_one: bool) -> Iterator[None]:
    """Make metadata meanwhile of a step that a graph holds, or that none does."""
    kept = _is_one.set(is_one)
    try:
        yield
    finally:
        _is_one.reset(kept)
