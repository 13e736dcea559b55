# SPDX-License-Identifier: Apache-2.0
"""The canary: a few prompts through the new weights before anybody is served by them.

Every update's logits must be finite; an update may also bound its perplexity on prompts of its own.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_fp8ext.config import Settings
from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract.prompts import require_prompts, sample
from vllm_fp8ext.update.contract.rank_results import CanaryScore

SAMPLE_TOKENS = 64
POOLING = "pooler instead of logits"
"""Name of what keeps prompts of reward models from being scored."""


@dataclass(frozen=True)
class CanarySpec:
    """`prompts`: token ids. `max_perplexity`: None when only finiteness is asked for. `built_in`: no text, whose perplexity
    would mean nothing."""

    prompts: list[list[int]]
    max_perplexity: float | None = None
    built_in: bool = False


def canary_of(
    request: Mapping[str, Any] | None, settings: Settings, vocabulary: int, longest: int
) -> CanarySpec:
    """The canary of an update: what it asked for, else the server's own, else a built-in sample of token ids.

    Raises:
        UpdateError: token ids beyond the vocabulary, prompts longer than the model takes, a perplexity without prompts.
    """
    defaults = settings.canary.model_dump() if settings.canary else {}
    chosen = {**defaults, **{key: value for key, value in (request or {}).items() if value is not None}}
    prompts, bound = chosen.get("prompts"), chosen.get("max_perplexity")
    if not prompts:
        if bound is not None:
            message = "canary: max_perplexity needs prompts to measure it on"
            raise UpdateError("invalid-request", message, status=422)
        return CanarySpec([sample(min(SAMPLE_TOKENS, longest), vocabulary)], built_in=True)
    require_prompts("canary", prompts, vocabulary, longest, shortest=2)
    return CanarySpec([list(prompt) for prompt in prompts], bound)


def no_prompts(untried: Sequence[str]) -> str:
    """Say why no prompt is scored on new weights: what a model has of these kinds."""
    return (
        f"prompts can't be scored on new weights of this model, because of its {', '.join(untried)}: all that is tried is "
        "whether they are finite. Expected no prompts of a canary, and no kv_scales to be calibrated"
    )


def require_prompts_run(canary: CanarySpec, untried: Sequence[str]) -> None:
    """Require a canary without prompts where none can be scored.

    Raises:
        UpdateError: `canary-unavailable`.
    """
    if untried and not canary.built_in:
        raise UpdateError("canary-unavailable", no_prompts(untried), status=422, layers=list(untried))


def judge(canary: CanarySpec, scores: Sequence[CanaryScore]) -> float | None:
    """Perplexity over all prompts, from each rank's summed log-probability (ranks without logits have none). None for the
    built-in sample.

    Raises:
        UpdateError: `canary-refused`: logits that are not finite, or a perplexity above the bound.
    """
    if not all(score.finite for score in scores):
        raise UpdateError(
            "canary-refused",
            "the new weights are not finite, or their logits on the canary's prompts are not",
            status=422,
            reason="non-finite",
        )
    if canary.built_in:
        return None
    (logprob, tokens), *_ = [(score.logprob, score.tokens) for score in scores if score.tokens]
    perplexity = math.exp(min(-logprob / tokens, 700.0))
    if canary.max_perplexity is not None and perplexity > canary.max_perplexity:
        raise UpdateError(
            "canary-refused",
            f"perplexity {perplexity:.4g} on the canary's prompts; at most {canary.max_perplexity:g} was asked for",
            status=422,
            reason="perplexity",
            expected=canary.max_perplexity,
            found=perplexity,
        )
    return perplexity
