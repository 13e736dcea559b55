# SPDX-License-Identifier: Apache-2.0
"""Calls that wait for an engine raise when it has ended, whichever of vLLM's clients they are of."""

import asyncio
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.core_client import AsyncMPClient, MPClient, SyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_fp8ext.compat.update import ended_calls


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MPClient, "shutdown", MPClient.shutdown)
    ended_calls.install()


def client(kind: type[MPClient], **futures: Any) -> Any:
    """One whose engine has ended: nothing is left to be stopped."""
    made = object.__new__(kind)
    made._finalizer = SimpleNamespace(detach=lambda: None)
    made.utility_results = dict(enumerate(futures.values()))
    return made


def test_a_call_of_an_llm_raises() -> None:
    waits, answered = Future[int](), Future[int]()
    answered.set_result(3)
    one = client(SyncMPClient, waits=waits, answered=answered)
    threading.Timer(0.1, one.shutdown).start()
    with pytest.raises(EngineDeadError):
        waits.result(60)
    assert answered.result() == 3


def test_a_call_of_an_async_llm_raises_in_its_loop() -> None:
    async def call() -> None:
        waits = asyncio.get_running_loop().create_future()
        cancelled = asyncio.get_running_loop().create_future()
        cancelled.cancel()
        one = client(AsyncMPClient, waits=waits, cancelled=cancelled)
        await asyncio.to_thread(one.shutdown)
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(waits, 60)

    asyncio.run(call())


def test_a_loop_that_is_closed_is_no_error() -> None:
    loop = asyncio.new_event_loop()
    one = client(AsyncMPClient, waits=loop.create_future())
    loop.close()
    one.shutdown()
