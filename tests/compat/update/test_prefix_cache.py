# SPDX-License-Identifier: Apache-2.0
"""Which cached blocks a request finds, with vLLM's own cache manager and an engine core that is nothing else."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request

from vllm_fp8ext.compat.update.prefix_cache import EpochPrefixCache, _salted

BLOCK = 16
BLOCKS = 12


@pytest.fixture
def core(block_cache: Callable[..., KVCacheManager]) -> Any:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    manager = block_cache([spec], BLOCKS)
    hashes = get_hash_fn_by_name("sha256")
    init_none_hash(hashes)
    scheduler = SimpleNamespace(kv_cache_manager=manager, requests={})
    return SimpleNamespace(scheduler=scheduler, request_block_hasher=get_request_block_hasher(BLOCK, hashes))


def made(core: Any, name: str, tokens: int = 3 * BLOCK) -> Request:
    """A request as the engine core's input thread makes it: hashed at once."""
    return Request(
        request_id=name,
        prompt_token_ids=list(range(tokens)),
        sampling_params=SamplingParams(max_tokens=8),
        pooling_params=None,
        block_hasher=core.request_block_hasher,
    )


def begun(core: Any, request: Request) -> int:
    """Schedule a request's prompt; how many of its tokens were found in the cache."""
    manager = core.scheduler.kv_cache_manager
    blocks, result, _ = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, request.num_tokens - result, result, blocks) is not None
    request.num_computed_tokens = request.num_tokens
    return int(result)


def ended(core: Any, request: Request) -> None:
    core.scheduler.kv_cache_manager.free(request)


def test_cached_blocks_are_found_within_an_epoch_only(core: Any) -> None:
    cache = EpochPrefixCache(core, 0)
    for epoch in range(3):
        cache.advance(epoch, recompute=False)
        first, second = (made(core, f"{epoch} {turn}") for turn in "ab")
        assert begun(core, first) == 0
        ended(core, first)
        assert begun(core, second) == 2 * BLOCK
        ended(core, second)


def test_a_request_that_waited_during_a_commit_finds_and_leaves_blocks_of_the_new_epoch(core: Any) -> None:
    cache = EpochPrefixCache(core, 0)
    before, waiting = made(core, "before"), made(core, "waiting")
    begun(core, before)
    cache.advance(1, recompute=False)
    assert begun(core, waiting) == 0
    assert begun(core, made(core, "after")) == 2 * BLOCK


def test_a_request_made_before_the_first_update_is_seen_too(core: Any) -> None:
    """Whether the scheduler knows it already, or its input thread holds it still."""
    known, held = made(core, "known"), made(core, "held")
    core.scheduler.requests["known"] = known
    cache = EpochPrefixCache(core, 0)
    begun(core, known)
    cache.advance(1, recompute=False)
    assert begun(core, held) == 0
    ended(core, held)
    cache.advance(2, recompute=False)
    assert begun(core, made(core, "after")) == 0


def test_what_a_kept_request_computes_is_found_by_nobody_of_the_new_epoch(core: Any) -> None:
    cache = EpochPrefixCache(core, 0)
    kept = made(core, "kept")
    begun(core, kept)
    cache.advance(1, recompute=False)
    kept.append_output_token_ids(list(range(3 * BLOCK, 5 * BLOCK)))
    manager = core.scheduler.kv_cache_manager
    assert manager.allocate_slots(kept, kept.num_tokens - kept.num_computed_tokens) is not None
    assert begun(core, made(core, "after", 5 * BLOCK)) == 0


def test_a_kept_request_that_is_preempted_is_of_the_new_epoch_from_then_on(core: Any) -> None:
    cache = EpochPrefixCache(core, 0)
    kept = made(core, "kept")
    begun(core, kept)
    cache.advance(1, recompute=False)
    ended(core, kept)
    kept.num_computed_tokens = 0
    assert begun(core, kept) == 0
    ended(core, kept)
    assert begun(core, made(core, "after")) == 2 * BLOCK


def test_blocks_of_old_epochs_make_room(core: Any) -> None:
    """Each epoch fills a quarter of the cache, and none is emptied."""
    cache = EpochPrefixCache(core, 0)
    for epoch in range(8):
        cache.advance(epoch, recompute=False)
        request = made(core, str(epoch))
        assert begun(core, request) == 0
        ended(core, request)
    assert core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == BLOCKS - 1


def test_no_salt_of_a_request_is_taken_for_an_epoch() -> None:
    assert _salted(None, 0) is None
    assert _salted("mine", 0) == "mine"
    forged = _salted(None, 1)
    assert forged is not None
    result = {_salted(salt, epoch) for salt in (None, "mine", forged, f"mine{forged}") for epoch in range(3)}
    assert len(result) == 12
