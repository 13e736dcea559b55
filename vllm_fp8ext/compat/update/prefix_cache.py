# SPDX-License-Identifier: Apache-2.0
"""Keeps cached K and V from being found across epochs.

The epoch is mixed into each request's block-hash chain. `KVCacheManager.get_computed_blocks` is the one place where a
request without blocks looks for some: it is hashed again there when its hashes are of another epoch (it waited during a
commit, or was preempted after one). So a commit itself costs nothing here, however many requests and blocks there are.
"""

from typing import Any

from vllm_fp8ext.compat.wrapping import wrap_instance

FEATURE: str = "core"
WHY: str = "Keep the prefix cache of different weights apart: vLLM finds K and V of any weights."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = (
    "vllm.v1.engine.core:EngineCore.request_block_hasher",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks(request)",
)
USES: dict[str, tuple[str, ...]] = {
    "hash a request again": (
        "vllm.v1.request:Request.update_block_hashes",
        "vllm.v1.request:Request._block_hasher",
    ),
    "mix the epoch into a request's block hashes": ("vllm.v1.request:Request.cache_salt",),
    "hash waiting requests again": ("vllm.v1.core.sched.scheduler:Scheduler.requests",),
    "recompute running requests after an update": (
        "vllm.v1.core.sched.scheduler:Scheduler.reset_prefix_cache(reset_running_requests)",
    ),
}
UPSTREAM: str = "https://github.com/vllm-project/vllm/pull/46125"
REMOVE_WHEN: str = "vLLM salts block hashes with the weight version"

_MARK = "\x1f"


class EpochPrefixCache:
    """The prefix cache of one engine core, seen by epoch."""

    def __init__(self, core: Any, epoch: int) -> None:
        self.epoch = epoch
        self._scheduler = core.scheduler
        self._hasher = core.request_block_hasher
        if self._hasher is None:
            return
        core.request_block_hasher = self._hash
        manager = self._scheduler.kv_cache_manager
        wrap_instance(manager, "get_computed_blocks", self._wrap_get_computed_blocks)
        for request in self._scheduler.requests.values():
            request._block_hasher = self._hash
            request.fp8ext_epoch = epoch

    def advance(self, epoch: int, *, recompute: bool) -> None:
        """A new epoch begins. `recompute`: preempt every running request and empty the cache.

        Otherwise running requests keep their blocks under the old chain. No request that looks for blocks from now on can
        reach that chain: what nobody holds of it is reused like any free block, the least recently used first.
        """
        self.epoch = epoch
        if recompute:
            self._scheduler.reset_prefix_cache(reset_running_requests=True)

    def _wrap_get_computed_blocks(self, original: Any) -> Any:
        def get_computed_blocks(request: Any, *limit: Any) -> Any:
            """`limit`: of the hit's length, which vLLM 0.33 passes."""
            if getattr(request, "fp8ext_epoch", None) != self.epoch:
                request._block_hasher = self._hash
                request.fp8ext_epoch = self.epoch
                request.block_hashes.clear()
                request.update_block_hashes()
            return original(request, *limit)

        return get_computed_blocks

    def _hash(self, request: Any) -> list[Any]:
        """New block hashes of a request, on a chain whose root holds its epoch."""
        if not hasattr(request, "fp8ext_epoch"):
            request.fp8ext_epoch = self.epoch
        salt, request.cache_salt = request.cache_salt, _salted(request.cache_salt, request.fp8ext_epoch)
        try:
            hashes: list[Any] = self._hasher(request)
            return hashes
        finally:
            request.cache_salt = salt


def _salted(salt: str | None, epoch: int) -> str | None:
    """A request's cache salt with the epoch; epoch 0 is unsalted, as in a server that never updates, unless the salt could be
    taken for one of ours."""
    plain = epoch == 0 and _MARK not in (salt or "")
    return salt if plain else f"{salt or ''}{_MARK}fp8ext-epoch-{epoch}"
