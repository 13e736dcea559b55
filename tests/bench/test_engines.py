# SPDX-License-Identifier: Apache-2.0
"""Engines beside each other, each in processes of its own."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator

import pytest
from forked_python.spawning import spawned_are_forked

from vllm_fp8ext.bench.engines import Engine, EngineError, in_turn
from vllm_fp8ext.bench.rollout import require_within
from vllm_fp8ext.checkpoints import LATE

PATIENCE = 30.0
SMALL = {"enforce_eager": True, "kv_cache_memory_bytes": 16 << 20, "gpu_memory_utilization": 0.1}


@pytest.fixture(autouse=True)
def forked() -> Iterator[None]:
    """Engines without the seconds that importing vLLM takes."""
    with spawned_are_forked():
        yield


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


@pytest.mark.alone
def test_an_engine_that_waits_for_its_turn_ends_with_the_one_before_it() -> None:
    made: list[Engine] = []

    def held() -> Iterator[Engine]:
        for name in ("first", "second", "third"):
            made.append(Engine(LATE, name, SMALL, held=True))
            yield made[-1]

    engines = in_turn(held())
    engine, seconds = next(engines)
    assert (engine.name, len(made)) == ("first", 2)
    assert seconds > 0
    assert engine.seconds(1, 4, 2, 0) > 0
    engines.close()
    for engine in made:
        engine._process.join(PATIENCE)
        assert engine._process.exitcode is not None


@pytest.mark.alone
def test_an_engine_that_does_not_start_is_named() -> None:
    engines = in_turn(iter([Engine(LATE, "wrong", {"max_model_len": -2}, held=True)]))
    with pytest.raises(EngineError, match="the engine wrong ended"):
        next(engines)


@pytest.mark.alone
def test_an_engine_that_ends_before_its_turn_is_named() -> None:
    engine = Engine(LATE, "gone", SMALL, held=True)
    engine._process.kill()
    with pytest.raises(EngineError, match="the engine gone ended"):
        engine.begin()


@pytest.mark.alone
def test_linear_layers_of_an_engine_are_within_their_bound() -> None:
    arguments = {**SMALL, "quantization": "blockfp8", "additional_config": {"fp8ext": {"staging": "none"}}}
    with contextlib.closing(Engine(LATE, "late", arguments)) as engine:
        engine.wait()
        errors = engine.linear_errors((1, 40))
        require_within("late", errors)
    assert errors.keys() == {"512x256", "256x256", "1280x256", "256x640"}
    assert all(error > 0 for error in errors.values())


def test_a_layer_that_is_not_within_its_bound_is_named() -> None:
    with pytest.raises(
        EngineError, match=r"blockfp8, KV auto: .*found errors of \{'8x4': 1.5, '8x2': nan\} times"
    ):
        require_within("blockfp8, KV auto", {"8x4": 1.5, "4x8": 0.5, "8x2": float("nan")})
