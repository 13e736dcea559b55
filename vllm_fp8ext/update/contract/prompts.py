# SPDX-License-Identifier: Apache-2.0
"""Token ids that an update is tried on: whether the model takes them, and a sample where nobody gave any."""

from collections.abc import Sequence

from vllm_fp8ext.errors import UpdateError

_STRIDE = 2654435761
"""Knuth's multiplicative hash (The Art of Computer Programming, vol. 3, section 6.4): spreads the sample over the
vocabulary."""


def require_prompts(
    of: str, prompts: Sequence[Sequence[int]], vocabulary: int, longest: int, *, shortest: int = 1
) -> None:
    """Raises `UpdateError` (`invalid-request`): prompts `of` a setting with token ids or lengths that the model does not
    take."""
    for number, prompt in enumerate(prompts):
        beyond = [token for token in prompt if not 0 <= token < vocabulary]
        if not shortest <= len(prompt) <= longest:
            wrong = f"expected {shortest} to {longest} tokens, found {len(prompt)}"
        elif beyond:
            wrong = f"expected token ids below {vocabulary}, found {beyond[0]}"
        else:
            continue
        raise UpdateError("invalid-request", f"{of}: prompt {number}: {wrong}", status=422)


def sample(tokens: int, vocabulary: int) -> list[int]:
    """So many token ids from all over the vocabulary, the same every time."""
    return [index * _STRIDE % vocabulary for index in range(tokens)]
