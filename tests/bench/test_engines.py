# SPDX-License-Identifier: Apache-2.0
"""Engines beside each other, each in processes of its own."""

import contextlib
import os
import threading
import time

import pytest

from vllm_fp8ext.bench.engines import Engine, EngineError
from vllm_fp8ext.checkpoints import LATE

PATIENCE = 30.0


def lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.alone
def test_an_engine_that_is_still_loading_ends_at_once_with_its_processes() -> None:
    """As when a person interrupts a measurement."""
    engine = Engine(LATE, "late", {"enforce_eager": True})
    group = engine._process.pid
    assert group

    def wait() -> None:
        with contextlib.suppress(EngineError):
            engine.wait()

    waiting = threading.Thread(target=wait)
    waiting.start()
    give_up = time.monotonic() + PATIENCE
    while not lives(group) and time.monotonic() < give_up:
        time.sleep(0.05)
    begun = time.monotonic()
    engine.close()
    assert time.monotonic() - begun < 5, "it was asked to end when it has loaded its model, and waited for"
    waiting.join(PATIENCE)
    while lives(group) and time.monotonic() < give_up + PATIENCE:
        time.sleep(0.05)
    assert not lives(group)
