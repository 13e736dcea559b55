# SPDX-License-Identifier: Apache-2.0
"""Runs prompts through a model that serves nobody, in slices of a few layers."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vllm_fp8ext.update.contract.rank_results import CanaryScore
from vllm_fp8ext.update.worker.cooperative_task import Pause

SLICE_TOKENS = 8192
"""Tokens times layers of a slice, at most: a few milliseconds."""
SLICE_LAYERS = 8
"""Layers of a slice, at most.

They are counted, not timed, so that all ranks of a tensor-parallel group make the same slices and meet in their collectives.
"""

ObserveLayer = Callable[[str, Tensor, Tensor, Tensor], None]
"""Takes `layer, query, key, value`: `[tokens, heads, head dimension]` each, as they would be cached."""


class AttachAttention(Protocol):
    """Makes a model's attention layers work without the engine, calling `after` after each.

    `lengths`: of prompts that stand one after the other.
    """

    def __call__(
        self,
        model: nn.Module,
        after: Callable[[], None],
        see: ObserveLayer | None = None,
        lengths: Sequence[int] | None = None,
    ) -> None: ...


def score_prompts(
    model: Any,
    prompts: list[list[int]],
    device: torch.device,
    attach_attention: AttachAttention,
    pause: Pause,
    *,
    has_logits: bool = True,
) -> CanaryScore:
    """Compute the log-probability of the prompts' own tokens (from the second on), in nats.

    Returns `logprob` (their sum), `tokens` (their number; 0 on a rank that gets no logits), and `finite`. Without
    `has_logits` (of a pooling model) only hidden states are looked at.
    """
    total, count, finite = 0.0, 0, True
    with torch.inference_mode():
        for prompt in prompts:
            attach_attention(model, _after_each_layer(len(prompt), pause))
            tokens = torch.tensor(prompt, device=device)
            hidden = model(input_ids=tokens, positions=torch.arange(len(prompt), device=device))
            logits = model.compute_logits(hidden) if has_logits else None
            finite = finite and bool(torch.isfinite(hidden).all())
            if logits is not None:
                total += _logprob(logits, tokens)
                finite = finite and bool(torch.isfinite(logits).all())
                count += len(prompt) - 1
            pause()
    return CanaryScore(logprob=total if finite else 0.0, tokens=count, finite=finite)


def observe_kv(
    model: Any,
    prompts: list[list[int]],
    device: torch.device,
    attach_attention: AttachAttention,
    see: ObserveLayer,
    pause: Pause,
) -> None:
    """Run prompts through the model in one pass; call `see` with every layer's queries, keys and values."""
    lengths = [len(prompt) for prompt in prompts]
    attach_attention(model, _after_each_layer(sum(lengths), pause), see, lengths)
    with torch.inference_mode():
        tokens = torch.tensor([token for prompt in prompts for token in prompt], device=device)
        positions = torch.cat([torch.arange(length, device=device) for length in lengths])
        model(input_ids=tokens, positions=positions)


def _after_each_layer(tokens: int, pause: Pause) -> Callable[[], None]:
    """Return a callback that pauses after each slice of a pass of so many tokens."""
    width = max(1, min(SLICE_LAYERS, SLICE_TOKENS // tokens))
    layers = itertools.count(1)

    def after() -> None:
        if next(layers) % width == 0:
            pause()

    return after


def _logprob(logits_TV: Tensor, tokens_T: Tensor) -> float:
    chosen = torch.log_softmax(logits_TV[:-1].float(), -1).gather(1, tokens_T[1:, None])
    return float(chosen.sum(dtype=torch.float64))
