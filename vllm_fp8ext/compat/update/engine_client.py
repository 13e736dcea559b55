# SPDX-License-Identifier: Apache-2.0
"""Calls the engine core from the API server, as vLLM's own client methods do."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

from vllm.v1.engine.core_client import AsyncMPClient

from vllm_fp8ext.compat.update.engine_changes import CHANGE
from vllm_fp8ext.compat.update.engine_shutdown import EngineEnd
from vllm_fp8ext.compat.update.heartbeat import PULSE
from vllm_fp8ext.errors import Failure, UpdateError
from vllm_fp8ext.update.contract.operations import Operation
from vllm_fp8ext.update.contract.results import JobStarted, Progress, Result, Waiting, decode

FEATURE: str = "core"
WHY: str = "Call the engine core from the API server: a plugin has no way of its own."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = ()
USES: dict[str, tuple[str, ...]] = {
    "call the engine core from the API server": (
        "vllm.v1.engine.core_client:AsyncMPClient.call_utility_async(method)",
        "vllm.v1.engine.async_llm:AsyncLLM.engine_core",
    ),
    "answer calls that a dead engine left open": (
        "vllm.v1.engine.core_client:BackgroundResources.engine_dead",
    ),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "`EngineClient` has a public way to call a plugin's utility method"

_LOOK_SECONDS = 0.25
"""How often a call looks whether the engine still lives: vLLM leaves open utility calls waiting when it dies."""

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05
"""Seconds between two polls of a job: a twentieth of the time that it has taken, within these."""


class EngineCalls:
    """Operations of the update engine, awaited; each answers within its deadline or raises. `end`: how its processes end.
    `heard`: called at each answer with the reason why the engine is poisoned, or None.

    Raises:
        ConfigError: an engine that somebody else calls.
    """

    def __init__(
        self,
        engine_client: Any,
        deadline_seconds: float,
        heard: Callable[[str | None], None] = lambda reason: None,
    ) -> None:
        self._client = engine_client
        self._heard = heard
        self._core = engine_client.engine_core
        self._deadline = deadline_seconds
        self.end = EngineEnd(self._core.resources)
        self._left = False

    async def __call__(self, operation: Operation, **arguments: Any) -> Any:
        """Run an operation; returns what it does (`update.contract.results`).

        Raises:
            UpdateError: what the operation refused, or `engine-timeout`, or `engine-dead`.
        """
        call = self._call_core("fp8ext", operation, arguments)
        watched = not operation.only_reads
        try:
            reply = await self._answer(call, operation, self._deadline, watched=watched)
        except UpdateError:
            raise
        except Exception as error:
            raise UpdateError("engine-dead", f"the engine failed: {error}", status=500) from error
        result, poisoned = decode(reply)
        self._heard(poisoned)
        return _unwrapped(result)

    async def changed(self, known: dict[str, Any] | None) -> dict[str, Any]:
        """Wait until something else holds than what is known (`UpdateEngine.change`), and return that.

        Raises:
            UpdateError: `engine-dead`.
        """
        call = self._call_core(CHANGE, known)
        try:
            change: dict[str, Any] = await self._answer(call, "a change")
        except UpdateError:
            raise
        except Exception as error:
            raise UpdateError("engine-dead", f"the engine failed: {error}", status=500) from error
        self._heard(change["poisoned"])
        return change

    def _call_core(self, method: str, *arguments: Any) -> Awaitable[Any]:
        """Call the one core that updates are asked of: the first of several, which vLLM would all call."""
        if isinstance(self._core, AsyncMPClient):
            return AsyncMPClient.call_utility_async(self._core, method, *arguments)
        call: Awaitable[Any] = self._core.call_utility_async(method, *arguments)
        return call

    async def _answer(
        self, call: Awaitable[Any], what: str, seconds: float = math.inf, *, watched: bool = False
    ) -> Any:
        """Return what a call returns, unless the engine ends or time is up.

        One that is `watched` then ends an engine whose process has not run for the last half of that: what is in it is
        frozen, too. One that generates or compiles for so long goes on.
        """
        task, pulse, silent = asyncio.ensure_future(call), None, 0.0
        begun = time.monotonic()
        try:
            while not (await asyncio.wait({task}, timeout=_LOOK_SECONDS))[0]:
                spent = time.monotonic() - begun
                if self._core.resources.engine_dead or self.end.engine_ended():
                    raise UpdateError("engine-dead", "the engine has ended", status=500)
                if watched and pulse is None and spent > seconds / 2:
                    pulse = asyncio.ensure_future(self._call_core("fp8ext", PULSE, {}))
                    pulse.add_done_callback(lambda done: done.cancelled() or done.exception())
                frozen = pulse is not None and not pulse.done()
                silent += _LOOK_SECONDS * frozen  # not by the clock: this process may not have run either
                if spent > seconds and (silent > seconds / 4 or not frozen):
                    message = f"the engine did not answer {what} within {seconds:g} s"
                    if frozen:
                        self.end.kill(f"{message}, nor did it run at all")
                    raise UpdateError("engine-timeout", message, status=504)
        finally:
            task.cancel()
            if pulse is not None:
                pulse.cancel()
        return task.result()

    async def job(self, operation: Operation, **arguments: Any) -> Any:
        """Run an operation that may start a job, and wait for its result.

        Raises:
            UpdateError: also `engine-timeout`, when no tensor was done for the deadline.
        """
        return await self.wait_for_job(operation, await self(operation, **arguments))

    async def wait_for_job(self, operation: Operation, started: Result) -> Any:
        """Wait for the result of an operation that has `started` a job, as `job` does; of another one, return `started`."""
        if not isinstance(started, JobStarted):
            return started
        # each poll takes something from the requests beside
        await asyncio.sleep(min(started.soonest, self._deadline / 2))
        progress, begun, until = Progress(step=1, tensors=-1), time.monotonic(), 0.0
        while True:
            result = await self(Operation.POLL, job=started.job)
            if not isinstance(result, Progress):
                return result
            now, moved = time.monotonic(), result.step != progress.step
            if moved:
                begun = now
            if moved or result.tensors != progress.tensors:
                progress, until = result, now + self._deadline
            if now > until:
                message = f"{operation}: nothing was done for {self._deadline:g} s"
                raise UpdateError("engine-timeout", message, status=504)
            # what goes on in polls alone, was waited for in this one, or has just gone on to its next step is polled at once:
            # engine steps come in between
            pause = min(_SHORTEST_PAUSE + (now - begun) / 20, _LONGEST_PAUSE)
            await asyncio.sleep(0 if result.again or moved else pause)

    async def sleep(self, level: int, mode: str) -> None:
        """Give memory back (`AsyncLLM.sleep`). No deadline: running requests may be waited for.

        Raises:
            UpdateError: `sleep-unavailable`, or `engine-dead`.
        """
        if not self._client.vllm_config.model_config.enable_sleep_mode:
            raise UpdateError(
                "sleep-unavailable",
                "this server was started without --enable-sleep-mode: it can't give memory back",
            )
        await self._answer(self._client.sleep(level, mode), "sleep")

    async def wake(self, tags: list[str] | None) -> None:
        """Take memory again (`AsyncLLM.wake_up`).

        Raises:
            UpdateError: `engine-dead`.
        """
        await self._answer(self._client.wake_up(tags), "wake")

    async def collective_rpc(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Call a method on every worker (`AsyncLLM.collective_rpc`). It has no deadline.

        Raises:
            UpdateError: `engine-dead`, or what became of an update that the method brought.
        """
        call = self._client.collective_rpc(method, None, args, kwargs)
        results: list[Any] = await self._answer(call, method)
        return results

    async def call_until_drained(self, operation: Operation, **arguments: Any) -> Any:
        """Run `job` until running requests need not be waited for any more."""
        while True:
            result = await self.job(operation, **arguments)
            if not isinstance(result, Waiting):
                return result
            if self._left:
                raise UpdateError("wrong-state", f"{operation} was given up: its caller has left")
            await asyncio.sleep(0.01)

    async def leave(self) -> None:
        """Wait for running requests no more, whatever was asked for."""
        self._left = True
        await self(Operation.LEAVE)


def _unwrapped(result: Result) -> Result:
    if isinstance(result, Failure):
        raise result.error
    return result
