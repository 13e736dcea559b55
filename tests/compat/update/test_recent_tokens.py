# SPDX-License-Identifier: Apache-2.0
"""The tokens of requests that ended last."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_fp8ext.compat.update.core_access import CoreAccess
from vllm_fp8ext.compat.update.recent_tokens import RecentTokens, attach
from vllm_fp8ext.config import Settings


class Cache:
    """Frees the blocks of requests, and says so."""

    def __init__(self) -> None:
        self.freed: list[Any] = []
        self.get_computed_blocks = None

    def free(self, request: Any) -> None:
        self.freed.append(request.all_token_ids)

    def end(
        self, *tokens: int, images: tuple[str, ...] = (), embeddings: Any = None, finished: bool = True
    ) -> None:
        request = SimpleNamespace(
            all_token_ids=list(tokens),
            mm_features=list(images),
            prompt_embeds=embeddings,
            is_finished=lambda: finished,
        )
        self.free(request)


def test_blocks_are_freed_as_before() -> None:
    cache = Cache()
    RecentTokens(cache, 10, 5)
    cache.end(1, 2)
    assert cache.freed == [[1, 2]]


def test_a_request_that_is_preempted_has_not_ended() -> None:
    cache = Cache()
    recent = RecentTokens(cache, 10, 5)
    cache.end(1, 2, finished=False)
    assert (cache.freed, recent.newest_first()) == ([[1, 2]], [])
    cache.end(1, 2, 3)
    assert recent.newest_first() == [[1, 2, 3]]


def test_ids_that_stand_for_something_else_are_not_kept() -> None:
    cache = Cache()
    recent = RecentTokens(cache, 10, 5)
    cache.end(1, 2)
    cache.end(3, 3, 3, images=("a cat",))
    cache.end(0, 0, embeddings="given")
    assert recent.newest_first() == [[1, 2]]


def test_the_newest_come_first_cut_to_their_beginning() -> None:
    cache = Cache()
    recent = RecentTokens(cache, 10, 3)
    assert recent.newest_first() == []
    cache.end(1, 2)
    cache.end(3, 4, 5, 6)
    assert recent.newest_first() == [[3, 4, 5], [1, 2]]


def test_the_oldest_are_forgotten_once_the_others_are_enough() -> None:
    cache = Cache()
    recent = RecentTokens(cache, 6, 4)
    for token in range(5):
        cache.end(*[token] * 3)
    assert recent.newest_first() == [[4] * 3, [3] * 3]
    cache.end(9)
    assert recent.newest_first() == [[9], [4] * 3, [3] * 3]
    for _ in range(100):
        cache.end(7)
    assert recent.newest_first() == [[7]] * 6


@pytest.mark.parametrize(
    ("policy", "remembered"),
    [("calibrate", [[3], [1, 2]]), ("history", [[3], [1, 2]]), ("provided", [[3], [1, 2]]), ("static", [])],
)
def test_an_engine_remembers_what_may_be_calibrated_with(policy: str, remembered: list[list[int]]) -> None:
    """Before its first update, too. With static scales nothing ever is."""
    cache = Cache()
    scheduler = SimpleNamespace(set_pause_state=None, kv_cache_manager=cache)
    config = SimpleNamespace(
        weight_transfer_config=None,
        device_config=SimpleNamespace(device_type="cpu"),
        additional_config={"fp8ext": {"kv_scales": policy}},
        cache_config=SimpleNamespace(cache_dtype="fp8"),
        parallel_config=SimpleNamespace(data_parallel_size=2),
        model_config=SimpleNamespace(quantization="blockfp8", get_vocab_size=lambda: 100, max_model_len=10),
    )
    core = SimpleNamespace(
        vllm_config=config,
        scheduler=scheduler,
        model_executor=None,
        request_block_hasher=None,
        add_request=None,
        _attach_weight_version=None,
    )
    attach(core, Settings.parse(config.additional_config))
    cache.end(1, 2)
    access = CoreAccess(core)
    cache.end(3)
    assert access.recent_tokens() == remembered
