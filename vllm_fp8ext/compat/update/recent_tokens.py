# SPDX-License-Identifier: Apache-2.0
"""Remembers the tokens of requests that ended last, to calibrate with."""

from collections import deque
from typing import Any

from vllm_fp8ext.compat.wrapping import wrap_instance
from vllm_fp8ext.config import Settings
from vllm_fp8ext.update.contract.kv_tokens import PROMPT_TOKENS

FEATURE: str = "core"
WHY: str = (
    "Calibrate KV-cache scales with the tokens that were served last: vLLM tells no plugin "
    "of finished requests."
)
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = ("vllm.v1.core.kv_cache_manager:KVCacheManager.free(request)",)
USES: dict[str, tuple[str, ...]] = {
    "calibrate KV-cache scales with the tokens that were served last": (
        "vllm.v1.request:Request.all_token_ids",
        "vllm.v1.request:Request.is_finished",
    ),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM tells plugins of finished requests"


def attach(core: Any, settings: Settings) -> None:
    """Let an engine core remember from its first request on what may be calibrated with; with static scales nothing is."""
    scales = settings.kv_scales
    if scales is not None and scales.policy != "static":
        manager = core.scheduler.kv_cache_manager
        core.fp8ext_recent_tokens = RecentTokens(manager, scales.tokens, PROMPT_TOKENS)


class RecentTokens:
    """The fewest requests that have `tokens` together, of each the first `longest`. They never leave the engine.

    `manager`: a scheduler's KV cache, which frees the blocks of every request that ends, and of those that are preempted.
    """

    def __init__(self, manager: Any, tokens: int, longest: int) -> None:
        self._requests: deque[list[int]] = deque()
        self._tokens, self._count, self._longest = tokens, 0, longest
        wrap_instance(manager, "free", self._wrap_free)

    def _wrap_free(self, original: Any) -> Any:
        def free(request: Any) -> None:
            # ids alone don't say what an image, or given embeddings, were
            if request.is_finished() and not request.mm_features and request.prompt_embeds is None:
                self._keep(list(request.all_token_ids[: self._longest]))
            original(request)

        return free

    def _keep(self, tokens: list[int]) -> None:
        self._requests.append(tokens)
        self._count += len(tokens)
        while self._requests and self._count - len(self._requests[0]) >= self._tokens:
            self._count -= len(self._requests.popleft())

    def newest_first(self) -> list[list[int]]:
        """Token ids by request."""
        return list(reversed(self._requests))
