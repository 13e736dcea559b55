# SPDX-License-Identifier: Apache-2.0
"""Remembers the tokens of requests that ended last, to calibrate with.

Replaces, on an instance: the scheduler's `_free_request`. Can go once vLLM tells plugins of finished requests.
"""

from collections import deque
from typing import Any


class RecentTokens:
    """The fewest requests that have `tokens` together, of each the first `longest`. They never leave the engine."""

    def __init__(self, scheduler: Any, tokens: int, longest: int) -> None:
        self._requests: deque[list[int]] = deque()
        self._tokens, self._count = tokens, 0
        original = scheduler._free_request

        def free(request: Any, *args: Any, **named: Any) -> Any:
            # ids alone don't say what an image, or given embeddings, were
            if not request.mm_features and request.prompt_embeds is None:
                self._keep(list(request.all_token_ids[:longest]))
            return original(request, *args, **named)

        scheduler._free_request = free

    def _keep(self, tokens: list[int]) -> None:
        self._requests.append(tokens)
        self._count += len(tokens)
        while self._requests and self._count - len(self._requests[0]) >= self._tokens:
            self._count -= len(self._requests.popleft())

    def newest_first(self) -> list[list[int]]:
        """Token ids by request."""
        return list(reversed(self._requests))
