# SPDX-License-Identifier: Apache-2.0
"""Tokens that scales are calibrated with."""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_fp8ext.kv_settings import KvScaleSettings
from vllm_fp8ext.update.contract.prompts import sample

PROMPT_TOKENS = 1024
"""Most tokens of one prompt, so that several have their say."""
ENOUGH = 8
"""Recent traffic counts from an eighth of the wanted tokens on."""


@dataclass(frozen=True)
class Tokens:
    """`source`: `update`, `settings`, `recent` or `built-in`."""

    prompts: list[list[int]]
    source: str

    @property
    def count(self) -> int:
        """Tokens in all prompts."""
        return sum(map(len, self.prompts))


def choose(
    requested: Sequence[Sequence[int]] | None,
    settings: KvScaleSettings,
    recent: Sequence[Sequence[int]],
    vocabulary: int,
    longest: int,
) -> Tokens:
    """The tokens of an update: its own, else the server's, else `recent` ones (newest first), else a built-in sample.

    The same tokens give the same scales, so a trainer that sends its own can compute them too.
    """
    chosen = requested or settings.prompts
    if chosen:
        prompts = _cut(chosen, settings.tokens, longest)
        return Tokens(prompts, "update" if requested else "settings")
    known = [prompt for prompt in recent if max(prompt, default=0) < vocabulary]
    recent_tokens = Tokens(_cut(known, settings.tokens, min(longest, PROMPT_TOKENS)), "recent")
    if recent_tokens.count * ENOUGH >= settings.tokens:
        return recent_tokens
    return Tokens(built_in(settings.tokens, vocabulary, longest), "built-in")


def built_in(tokens: int, vocabulary: int, longest: int) -> list[list[int]]:
    """Token ids from all over the vocabulary, in prompts of at most `PROMPT_TOKENS`."""
    length = min(tokens, longest, PROMPT_TOKENS)
    ids = sample(tokens, vocabulary)
    return [ids[start : start + length] for start in range(0, tokens, length)]


def _cut(prompts: Sequence[Sequence[int]], tokens: int, longest: int) -> list[list[int]]:
    cut: list[list[int]] = []
    for prompt in prompts:
        left = tokens - sum(map(len, cut))
        if left <= 0:
            break
        cut.append(list(prompt[: min(left, longest)]))
    return cut
