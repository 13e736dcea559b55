# SPDX-License-Identifier: Apache-2.0
"""vLLM's own cache manager with our answers before it and without, asked the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from vllm.v1.request import Request

from vllm_fp8ext.compat.speed import slot_fast_path

BLOCK, BLOCKS = 4, 14
HASH = get_hash_fn_by_name("sha256")
SHAPE: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
FULL = FullAttentionSpec(**SHAPE)


Caches = Callable[..., KVCacheManager]


@pytest.fixture(autouse=True, scope="module")
def chains() -> None:
    init_none_hash(HASH)


def request(name: str, tokens: int, start: int = 0) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=list(range(start, start + tokens)),
        sampling_params=SamplingParams(max_tokens=64),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK, HASH),
    )


class Scheduler:
    """As much of vLLM's as the cache sees, for prompts of a few chunks and steps that run ahead of their results."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.running: dict[str, Request] = {}
        self.ahead: dict[str, int] = {}

    def begin(self, name: str, tokens: int, chunk: int, lookahead: int) -> list[int] | None:
        new = request(name, tokens, start=tokens % 2)
        blocks, result, _ = self.cache.get_computed_blocks(new)
        count = min(chunk, tokens - result)
        got = self.cache.allocate_slots(new, count, result, blocks, num_lookahead_tokens=lookahead)
        if got is None:
            return None
        new.num_computed_tokens = result + count
        self.running[name], self.ahead[name] = new, int(new.num_computed_tokens == tokens)
        return self.known(got)

    def step(self, name: str, chunk: int, lookahead: int) -> list[int] | None:
        known = self.running[name]
        count = min(chunk, known.num_tokens + self.ahead[name] - known.num_computed_tokens)
        if count <= 0 or known.num_computed_tokens + count > 62:
            return None
        got = self.cache.allocate_slots(known, count, num_lookahead_tokens=lookahead)
        if got is None:
            return None
        known.num_computed_tokens += count
        self.ahead[name] += known.num_computed_tokens == known.num_tokens + self.ahead[name]
        return self.known(got)

    def result(self, name: str, token: int) -> None:
        known = self.running[name]
        if self.ahead[name]:
            self.ahead[name] -= 1
            known.append_output_token_ids(token)
            self.cache.cache_blocks(known, known.num_computed_tokens - self.ahead[name])

    def end(self, name: str) -> None:
        self.cache.free(self.running.pop(name))

    def known(self, got: Any) -> list[int]:
        return [block.block_id for group in got.blocks for block in group]

    def state(self) -> Any:
        (group,) = self.cache.coordinator.single_type_managers
        pool = self.cache.block_pool
        return (
            {
                name: [(b.block_id, b.ref_cnt, b.block_hash) for b in group.req_to_blocks[name]]
                for name in self.running
            },
            {name: group.num_cached_block.get(name) for name in self.running},
            pool.get_num_free_blocks(),
            [(b.block_id, b.block_hash) for b in pool.free_block_queue.get_all_free_blocks()],
        )


DEEDS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "step", "step", "step", "result", "result", "end"]),
        st.integers(0, 1),
        st.integers(1, 20),
        st.integers(1, 9),
        st.integers(0, 2),
    ),
    min_size=20,
    max_size=80,
)


@settings(max_examples=400)
@given(deeds=DEEDS, caching=st.booleans())
def test_answers_and_cache_are_those_of_vllm(
    block_cache: Caches, deeds: list[tuple[str, int, int, int, int]], caching: bool
) -> None:
    plain, quick = (Scheduler(block_cache([FULL], BLOCKS, enable_caching=caching)) for _ in range(2))
    slot_fast_path.attach(quick.cache)
    for deed, which, tokens, chunk, lookahead in deeds:
        name = f"request{which}"
        if (name in plain.running) == (deed == "begin"):
            continue
        arguments = {
            "begin": (tokens, chunk, lookahead),
            "step": (chunk, lookahead),
            "result": (tokens,),
            "end": (),
        }[deed]
        assert getattr(plain, deed)(name, *arguments) == getattr(quick, deed)(name, *arguments)
        assert plain.state() == quick.state()


@pytest.mark.parametrize("caching", [True, False])
def test_only_a_new_block_asks_vllm(block_cache: Caches, caching: bool) -> None:
    cache: Any = block_cache([FULL], BLOCKS, enable_caching=caching)
    asked = []
    allocate = cache.allocate_slots
    cache.allocate_slots = lambda known, *more, **others: (
        asked.append(known) or allocate(known, *more, **others)
    )
    slot_fast_path.attach(cache)
    scheduler = Scheduler(cache)
    scheduler.begin("request", 2 * BLOCK, 64, 0)
    asked.clear()
    for token in range(4 * BLOCK):
        scheduler.step("request", 1, 0)
        scheduler.result("request", token)
    assert len(asked) == 4


@pytest.mark.parametrize(
    "specs",
    [[SlidingWindowSpec(**SHAPE, sliding_window=8)], [FULL, SlidingWindowSpec(**SHAPE, sliding_window=8)]],
)
def test_layers_with_windows_are_left_to_vllm(block_cache: Caches, specs: list[KVCacheSpec]) -> None:
    cache = block_cache(specs, BLOCKS)
    slot_fast_path.attach(cache)
    assert "allocate_slots" not in vars(cache)


def test_blocks_that_are_cached_in_parts_are_left_to_vllm(block_cache: Caches) -> None:
    cache = block_cache([FULL], BLOCKS)
    cache.block_pool.hash_block_size = BLOCK // 2
    slot_fast_path.attach(cache)
    assert "allocate_slots" not in vars(cache)
