# SPDX-License-Identifier: Apache-2.0
"""Runs prompts through a model that nobody is served by, in slices of a few layers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vllm_fp8ext.weights.slices import Pause

SLICE_TOKENS = 2048
SLICE_LAYERS = 8
"""A slice is as many layers as make this many tokens times layers, and at most this many: a few milliseconds. Counted, not
timed, so that all ranks of a tensor-parallel group make the same slices and meet in their collectives."""

Attend = Callable[[nn.Module, Callable[[], None]], None]
"""`attend(model, after)`: make the model's attention layers work without the engine, calling `after` after each."""


def recite(
    model: Any, prompts: list[list[int]], device: torch.device, attend: Attend, pause: Pause
) -> dict[str, Any]:
    """Log-probability of the prompts' own tokens (from the second on), in nats.

    Returns `logprob` (their sum), `tokens` (their number; 0 on a rank that gets no logits), and `finite`.
    """
    layers = 0
    width = 1

    def after() -> None:
        nonlocal layers
        layers += 1
        if layers % width == 0:
            pause()

    attend(model, after)
    total, count, finite = 0.0, 0, True
    with torch.inference_mode():
        for prompt in prompts:
            width = max(1, min(SLICE_LAYERS, SLICE_TOKENS // len(prompt)))
            tokens = torch.tensor(prompt, device=device)
            hidden = model(input_ids=tokens, positions=torch.arange(len(prompt), device=device))
            logits = model.compute_logits(hidden)
            finite = finite and bool(torch.isfinite(hidden).all())
            if logits is not None:
                total += _logprob(logits, tokens)
                finite = finite and bool(torch.isfinite(logits).all())
                count += len(prompt) - 1
            pause()
    return {"logprob": total if finite else 0.0, "tokens": count, "finite": finite}


def _logprob(logits_TV: Tensor, tokens_T: Tensor) -> float:
    chosen = torch.log_softmax(logits_TV[:-1].float(), -1).gather(1, tokens_T[1:, None])
    return float(chosen.sum(dtype=torch.float64))
