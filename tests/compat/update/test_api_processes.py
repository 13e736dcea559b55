# SPDX-License-Identifier: Apache-2.0
"""How one of several API server processes ends."""

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_fp8ext.compat.update import api_processes
from vllm_fp8ext.compat.update.api_processes import ApiProcesses, let_requests_finish


class Client:
    """An `AsyncLLM` with two requests, on an engine of another process."""

    def __init__(self) -> None:
        self.output_processor = SimpleNamespace(request_states={"a": 1, "b": 2})
        self.engine_core = self
        self.resources = SimpleNamespace(engine_dead=False)
        self.aborted: list[str] = []
        self.engine_has_ended = False

    async def abort_requests_async(self, names: list[str]) -> None:
        self.aborted += names

    def engine_ended(self) -> bool:
        return self.engine_has_ended

    async def shut_down(self, seconds: float) -> None:
        """As vLLM does, on a thread."""
        loop = asyncio.get_running_loop()
        finish = partial(let_requests_finish, self, loop, self, seconds)  # type: ignore[arg-type]
        await asyncio.wait_for(loop.run_in_executor(None, finish), 60)


def test_requests_that_end_in_time_are_waited_for() -> None:
    client = Client()

    async def main() -> None:
        ending = asyncio.ensure_future(client.shut_down(600.0))
        await asyncio.sleep(0.1)
        assert not ending.done()
        client.output_processor.request_states.clear()
        await ending

    asyncio.run(main())
    assert not client.aborted


def test_requests_that_do_not_are_aborted_in_the_engine() -> None:
    """Nobody would read what it makes of them, and it ends later for them."""
    client = Client()
    asyncio.run(client.shut_down(0.1))
    assert client.aborted == ["a", "b"]


@pytest.mark.parametrize("how", ["told", "seen"])
def test_nobody_waits_for_an_engine_that_has_ended(how: str) -> None:
    client = Client()
    client.resources.engine_dead, client.engine_has_ended = how == "told", how == "seen"
    asyncio.run(client.shut_down(600.0))
    assert not client.aborted


def test_a_launcher_ends_with_the_code_of_a_failure_when_a_process_has_failed() -> None:
    def wait(failed: bool) -> None:
        if failed:
            raise RuntimeError("Process ApiServer_0 (PID: 7) died with exit code -9")

    wrapped = api_processes._wrap_wait_for_completion_or_failure(wait)
    wrapped(False)
    with pytest.raises(SystemExit) as caught:
        wrapped(True)
    assert caught.value.code == 70


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        ({"_api_process_count": 1, "_api_process_rank": -1}, ApiProcesses()),
        ({"_api_process_count": 3, "_api_process_rank": -1}, ApiProcesses(count=3, rank=-1)),
        ({"_api_process_count": 3, "_api_process_rank": 2}, ApiProcesses(count=3, rank=2)),
        ({}, ApiProcesses()),
    ],
)
def test_a_configuration_says_how_many_there_are(parallel: dict[str, Any], expected: ApiProcesses) -> None:
    assert ApiProcesses.of(SimpleNamespace(parallel_config=SimpleNamespace(**parallel))) == expected
