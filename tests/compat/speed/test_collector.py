# SPDX-License-Identifier: Apache-2.0
"""How often garbage is collected."""

import gc
from collections.abc import Iterator

import pytest

from vllm_fp8ext.compat.speed import collector


@pytest.fixture
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("thresholds")
def test_what_a_step_makes_is_not_looked_at() -> None:
    gc.set_threshold(700, 10, 10)
    collector.look_less_often()
    gc.collect()
    looked: list[int] = []

    def look(phase: str, facts: dict[str, int]) -> None:
        looked.append(facts["generation"])

    gc.callbacks.append(look)
    try:
        for _ in range(10):
            step = [[number] for number in range(5000)]
            del step
    finally:
        gc.callbacks.remove(look)
    assert not looked


@pytest.mark.usefixtures("thresholds")
@pytest.mark.parametrize("chosen", [(0, 10, 10), (50_000, 5, 5)], ids=["off", "another"])
def test_a_threshold_that_somebody_set_stays(chosen: tuple[int, int, int]) -> None:
    gc.set_threshold(*chosen)
    collector.look_less_often()
    assert gc.get_threshold() == chosen
