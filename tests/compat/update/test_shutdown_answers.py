# SPDX-License-Identifier: Apache-2.0
"""Requests that a server has left open when it stops its engine."""

import asyncio
from functools import partial
from types import SimpleNamespace

from vllm.v1.engine.exceptions import EngineDeadError

from vllm_fp8ext.compat.update.shutdown_answers import answer_at_the_end


def test_requests_are_told_once_the_engine_is_shut_down() -> None:
    """Also where the task that would tell them was cancelled first. vLLM shuts an engine down on a thread, and again."""
    told: list[object] = []

    async def main() -> None:
        def shutdown(timeout: float | None = None) -> None:
            told.append(timeout)

        requests = SimpleNamespace(propagate_error=told.append)
        client = SimpleNamespace(shutdown=shutdown, output_processor=requests)
        answer_at_the_end(client)
        await asyncio.get_running_loop().run_in_executor(None, client.shutdown, 3.0)
        await asyncio.sleep(0)
        client.shutdown()
        await asyncio.sleep(0)
        stop.append(client.shutdown)

    stop: list[object] = []
    asyncio.run(main())
    first, error, second, again = told
    assert (first, second) == (3.0, None)
    assert isinstance(error, EngineDeadError)
    assert isinstance(again, EngineDeadError)
    (shut_down,) = stop
    assert callable(shut_down)
    shut_down()  # the loop is closed


def test_requests_may_finish_before_an_engine_of_several_processes_is_let_go() -> None:
    """On the thread on which vLLM shuts down first, for the time that it gives."""
    calls: list[object] = []

    async def main() -> None:
        requests = SimpleNamespace(propagate_error=lambda error: None)
        shutdown = lambda timeout=None: calls.append(("shut down", timeout))  # noqa: E731
        client = SimpleNamespace(shutdown=shutdown, output_processor=requests)
        answer_at_the_end(client, lambda seconds: calls.append(("let finish", seconds)))
        run = asyncio.get_running_loop().run_in_executor
        await run(None, partial(client.shutdown, timeout=3.0))
        client.shutdown(timeout=3.0)  # again, on the event loop
        await run(None, partial(client.shutdown, timeout=0))

    asyncio.run(main())
    assert calls == [("let finish", 3.0), *[("shut down", 3.0)] * 2, ("shut down", 0)]
