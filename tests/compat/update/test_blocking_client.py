# SPDX-License-Identifier: Apache-2.0
"""What an `LLM` must be like for its weights to be updated, and what becomes of it. (Calls of a real one:
tests/e2e/test_embedded.py.)"""

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import UtilityOutput, UtilityResult
from vllm.v1.engine.core_client import (
    BackgroundResources,
    InprocClient,
    SyncMPClient,
    _process_utility_output,
)

from vllm_fp8ext.compat.update.blocking_client import BlockingEngine
from vllm_fp8ext.compat.update.engine_client import EngineCalls
from vllm_fp8ext.errors import ConfigError, UpdateError
from vllm_fp8ext.update.contract.operations import Operation


def silent(*_: Any) -> None:
    """An engine that takes what is sent and never answers."""


class Engine:
    """An `LLM` around vLLM's client, without its sockets and processes: `send` is what it sends by."""

    def __init__(self, send: Callable[..., None] = silent) -> None:
        core: Any = SyncMPClient.__new__(SyncMPClient)
        core.utility_results = {}
        core.resources = BackgroundResources(ctx=None)
        core.resources.engine_manager = SimpleNamespace(processes=[], shutdown=silent)
        core._send_input = send
        self.llm_engine = SimpleNamespace(
            engine_core=core,
            vllm_config=SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=True)),
            renderer=SimpleNamespace(clear_mm_cache=silent),
            logger_manager=None,
        )

    @property
    def core(self) -> Any:
        return self.llm_engine.engine_core


def test_an_engine_core_in_the_trainers_thread_is_refused() -> None:
    core = InprocClient.__new__(InprocClient)
    with pytest.raises(ConfigError, match=r"InprocClient.*leave VLLM_ENABLE_V1_MULTIPROCESSING at 1"):
        BlockingEngine(SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core)))


def test_an_answer_after_the_deadline_is_taken() -> None:
    """vLLM's thread that takes answers ends on one to a future that was cancelled, and with it every later call."""
    llm = Engine()
    calls = EngineCalls(BlockingEngine(llm), 0.1)
    with pytest.raises(UpdateError) as refused:
        asyncio.run(calls(Operation.STATUS))
    assert refused.value.kind == "engine-timeout"
    (id,) = llm.core.utility_results
    _process_utility_output(UtilityOutput(id, result=UtilityResult({"late": True})), llm.core.utility_results)


def test_two_threads_send_one_after_the_other() -> None:
    inside: list[int] = []
    most: list[int] = []

    def send(*_: Any) -> None:
        inside.append(1)
        time.sleep(0.01)
        most.append(len(inside))
        inside.pop()

    llm = Engine(send)
    engine = BlockingEngine(llm)
    threads = [threading.Thread(target=lambda: llm.core._send_input("add", None)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 4
    engine.close()
    assert llm.core._send_input is send


@pytest.mark.parametrize("name", ["sleep", "wake"])
def test_an_engine_that_dies_while_it_is_put_to_sleep_or_woken_is_named(name: str) -> None:
    llm = Engine()
    calls = EngineCalls(BlockingEngine(llm), 60.0)

    async def main() -> None:
        call = asyncio.create_task(calls.sleep(1, "abort") if name == "sleep" else calls.wake(None))
        await asyncio.sleep(0.05)
        assert llm.core.utility_results
        llm.core.resources.engine_dead = True
        await call

    with pytest.raises(UpdateError) as refused:
        asyncio.run(asyncio.wait_for(main(), 20))
    assert refused.value.kind == "engine-dead"


def test_an_engine_has_one_session_at_a_time_and_is_left_as_it_was() -> None:
    llm = Engine()
    resources = llm.core.resources
    parts = (llm.core, resources, resources.engine_manager)
    before = [dict(vars(part)) for part in parts]
    for _ in range(2):
        engine = BlockingEngine(llm)
        calls = EngineCalls(engine, 1.0)
        second = BlockingEngine(llm)
        with pytest.raises(ConfigError, match="one session of updates for an engine at a time"):
            EngineCalls(second, 1.0)
        second.close()
        calls.end.close()
        engine.close()
        assert [dict(vars(part)) for part in parts] == before


def test_an_engine_that_was_let_go_ends() -> None:
    """vLLM stops an `LLM`'s engine when nobody holds its client. What notes how the engine ends is held by what stops it."""
    llm = Engine()
    held = llm.core.resources
    client = weakref.ref(llm.core)
    engine = BlockingEngine(llm)
    calls = EngineCalls(engine, 1.0)
    engine.close()
    del llm, engine, calls
    gc.collect()
    assert client() is None
    assert "validate_alive" in vars(held), "this one was not closed"
