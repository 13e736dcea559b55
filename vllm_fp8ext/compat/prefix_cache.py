# SPDX-License-Identifier: Apache-2.0
"""Keeps cached K and V from being found across epochs.

The epoch is mixed into each request's block-hash chain. Replaces: `EngineCore.request_block_hasher`, `EngineCore.add_request`
(a request may have been hashed by the input thread before a commit and be added after it) and `Scheduler._preempt_request` (a
kept request that loses its blocks must not find its old ones). Can go once vLLM salts block hashes with the weight version.
"""

from typing import Any


class EpochPrefixCache:
    """The prefix cache of one engine core, seen by epoch."""

    def __init__(self, core: Any, epoch: int) -> None:
        self.epoch = epoch
        self._core = core
        self._hasher = core.request_block_hasher
        if self._hasher is None:
            return
        core.request_block_hasher = self._hash
        self._add = core.add_request
        core.add_request = self._add_request
        self._preempt = core.scheduler._preempt_request
        core.scheduler._preempt_request = self._preempt_request
        for request in core.scheduler.requests.values():
            request._block_hasher = self._hash
            request.fp8ext_epoch = epoch

    def advance(self, epoch: int, *, recompute: bool) -> None:
        """A new epoch begins. `recompute`: preempt every running request and empty the cache.

        Otherwise running requests keep their blocks under the old chain, which no new request can reach; waiting ones,
        which hold none, are hashed again; cached blocks that nobody holds are evicted.
        """
        self.epoch = epoch
        scheduler = self._core.scheduler
        if recompute:
            scheduler.reset_prefix_cache(reset_running_requests=True)
        if self._hasher is None:
            return
        running = {request.request_id for request in scheduler.running}
        for request in scheduler.requests.values():
            if request.request_id not in running:
                self._rehash(request)
        if not recompute:
            pool = scheduler.kv_cache_manager.block_pool
            pool.evict_blocks(
                {
                    block.block_id
                    for block in pool.blocks
                    if block.ref_cnt == 0 and block.block_hash is not None
                }
            )

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

    def _rehash(self, request: Any) -> None:
        if getattr(request, "fp8ext_epoch", None) != self.epoch:
            request._block_hasher = self._hash
            request.fp8ext_epoch = self.epoch
            request.block_hashes.clear()
            request.update_block_hashes()

    def _add_request(self, request: Any, *args: Any) -> None:
        self._rehash(request)
        self._add(request, *args)

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        self._preempt(request, *args, **kwargs)
        self._rehash(request)


def _salted(salt: str | None, epoch: int) -> str | None:
    """A request's cache salt with the epoch; epoch 0 is unsalted, as in a server that never updates."""
    return salt if epoch == 0 else f"{salt or ''}\x1ffp8ext-epoch-{epoch}"
