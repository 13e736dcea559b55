# SPDX-License-Identifier: Apache-2.0
"""The tokens of requests that ended last."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_fp8ext.compat.update.core_access import CoreAccess
from vllm_fp8ext.compat.update.recent_tokens import RecentTokens


class Scheduler:
    """Frees requests, and says so."""

    def __init__(self) -> None:
        self.freed: list[Any] = []

    def _free_request(self, request: Any, delay_free_blocks: bool = False) -> Any:
        self.freed.append((request.all_token_ids, delay_free_blocks))
        return {"freed": len(self.freed)}

    def end(self, *tokens: int, images: tuple[str, ...] = (), embeddings: Any = None) -> Any:
        request = SimpleNamespace(
            all_token_ids=list(tokens), mm_features=list(images), prompt_embeds=embeddings
        )
        return self._free_request(request, delay_free_blocks=True)


def test_the_scheduler_frees_as_before() -> None:
    scheduler = Scheduler()
    RecentTokens(scheduler, 10, 5)
    assert scheduler.end(1, 2) == {"freed": 1}
    assert scheduler.freed == [([1, 2], True)]


def test_ids_that_stand_for_something_else_are_not_kept() -> None:
    scheduler = Scheduler()
    recent = RecentTokens(scheduler, 10, 5)
    scheduler.end(1, 2)
    scheduler.end(3, 3, 3, images=("a cat",))
    scheduler.end(0, 0, embeddings="given")
    assert recent.newest_first() == [[1, 2]]


def test_the_newest_come_first_cut_to_their_beginning() -> None:
    scheduler = Scheduler()
    recent = RecentTokens(scheduler, 10, 3)
    assert recent.newest_first() == []
    scheduler.end(1, 2)
    scheduler.end(3, 4, 5, 6)
    assert recent.newest_first() == [[3, 4, 5], [1, 2]]


def test_the_oldest_are_forgotten_once_the_others_are_enough() -> None:
    scheduler = Scheduler()
    recent = RecentTokens(scheduler, 6, 4)
    for token in range(5):
        scheduler.end(*[token] * 3)
    assert recent.newest_first() == [[4] * 3, [3] * 3]
    scheduler.end(9)
    assert recent.newest_first() == [[9], [4] * 3, [3] * 3]
    for _ in range(100):
        scheduler.end(7)
    assert recent.newest_first() == [[7]] * 6


@pytest.mark.parametrize(
    ("policy", "remembered"),
    [("calibrate", [[1, 2]]), ("history", [[1, 2]]), ("provided", [[1, 2]]), ("static", [])],
)
def test_an_engine_remembers_what_may_be_calibrated_with(policy: str, remembered: list[list[int]]) -> None:
    """With static scales nothing ever is."""
    scheduler: Any = Scheduler()
    scheduler.set_pause_state = None
    scheduler.kv_cache_manager = SimpleNamespace(get_computed_blocks=None)
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
    access = CoreAccess(core)
    scheduler.end(1, 2)
    assert access.recent_tokens() == remembered
