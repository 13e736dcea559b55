# SPDX-License-Identifier: Apache-2.0
"""Answers the scheduler at once where a request holds a slot for its next token already, as in 15 of 16 steps of one that
decodes: the host's part of a step with many requests is what small models wait for.

Replaces `KVCacheManager.allocate_slots` of an engine whose layers all see their whole context. Can go once vLLM asks for no
slots where a request has them.
"""

from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager


def attach(cache: Any) -> None:
    """`cache`: a scheduler's `KVCacheManager`."""
    managers = cache.coordinator.single_type_managers
    if len(managers) != 1 or type(managers[0]) is not FullAttentionManager:
        return
    manager, nothing, allocate = managers[0], cache.empty_kv_cache_blocks, cache.allocate_slots
    blocks, partial, cached = manager.req_to_blocks, manager._partial_hit_reqs, manager.num_cached_block
    caches = manager.enable_caching and manager.kv_cache_spec.prefix_cacheable

    def allocate_slots(
        request: Any, num_new_tokens: int, *more: Any, num_lookahead_tokens: int = 0, **others: Any
    ) -> Any:
        if num_new_tokens > 0 and not more and not others:
            name = request.request_id
            held = blocks.get(name)
            tokens = request.num_computed_tokens + num_new_tokens
            if (
                held
                and tokens + num_lookahead_tokens <= len(held) * manager.block_size
                and name not in partial
            ):
                # blocks are cached when they are full
                full = min(tokens, request.num_tokens) // manager.block_size if caches else 0
                if full <= cached.get(name, 0):
                    return nothing
        return allocate(request, num_new_tokens, *more, num_lookahead_tokens=num_lookahead_tokens, **others)

    cache.allocate_slots = allocate_slots
