# SPDX-License-Identifier: Apache-2.0
"""Calls the engine core from the API server.

Uses the asynchronous utility call that vLLM's own client methods use. Replaces, on instances,
`BackgroundResources.validate_alive`, to note that an engine told of its death, and `CoreEngineProcManager.shutdown`, to note
which had ended before they were stopped. Can go once `EngineClient` has a public way to call a plugin's utility method, and
vLLM's server an exit code when its engine died.
"""

import asyncio
import logging
import multiprocessing.connection
import os
import signal
import time
from typing import Any

from vllm.v1.engine.exceptions import EngineDeadError

from vllm_fp8ext.compat.watchdog import EXIT_CODE
from vllm_fp8ext.errors import UpdateError

logger = logging.getLogger("vllm.fp8ext")

_LOOK_SECONDS = 0.25
"""How often a call looks whether the engine still lives: vLLM leaves open utility calls waiting when it dies."""


_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05
"""Seconds between two polls of a job: a twentieth of the time that it has taken, within these."""

_END_SECONDS = 10.0
"""How long a process that has begun to end may take for the rest: memory of a GPU is given back then."""


class EngineCalls:
    """Operations of the update engine, awaited; each answers within its deadline or raises."""

    def __init__(self, engine_client: Any, deadline_seconds: float) -> None:
        self._client = engine_client
        self._core = engine_client.engine_core
        self._died = False
        self._note_death()
        self._deadline = deadline_seconds
        self._processes = list(self._core.resources.engine_manager.processes)
        self._ended: list[int | None] | None = None
        """Exit codes when the processes were stopped."""
        self._note_stop()

    def require_clean_end(self) -> None:
        """To be called when this process ends: end it with `EXIT_CODE` when the engine's process failed.

        vLLM's server ends with 0 when its engine died, which a supervisor takes for a wish. An engine that it stops itself,
        by force if that takes long, did not fail.
        """
        codes = self._exit_codes() if self._ended is None else self._ended
        failed = [code for code in codes if code not in (None, 0, -signal.SIGTERM, -signal.SIGINT)]
        if failed or self._died:
            logger.critical(
                "fp8ext: the engine died (code %s); so this server ends with %d", failed or codes, EXIT_CODE
            )
            logging.shutdown()
            os._exit(EXIT_CODE)

    def _note_death(self) -> None:
        """An engine that fails says so before it ends; vLLM's server may stop it then, and its code is that of a wish."""
        resources = self._core.resources
        check = resources.validate_alive

        def validate_alive(frames: Any) -> None:
            try:
                check(frames)
            except EngineDeadError:
                self._died = True
                raise

        resources.validate_alive = validate_alive

    def _note_stop(self) -> None:
        manager = self._core.resources.engine_manager
        shutdown = manager.shutdown

        def noted(*arguments: Any, **named: Any) -> None:
            if self._ended is None:
                self._ended = self._exit_codes()
            shutdown(*arguments, **named)

        manager.shutdown = noted

    def _exit_codes(self) -> list[int | None]:
        # a process that ends closes its sentinel, by which vLLM's monitor sees the end, before it has a code
        ended = multiprocessing.connection.wait([process.sentinel for process in self._processes], timeout=0)
        for process in self._processes:
            if process.sentinel in ended:
                process.join(_END_SECONDS)
        return [process.exitcode for process in self._processes]

    async def __call__(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Run an operation.

        Raises:
            UpdateError: what the operation refused, or `engine-timeout`, or `engine-dead`.
        """
        call = asyncio.ensure_future(self._core.call_utility_async("fp8ext", operation, arguments))
        until = time.monotonic() + self._deadline
        try:
            while not (await asyncio.wait({call}, timeout=_LOOK_SECONDS))[0]:
                if self._core.resources.engine_dead:
                    raise UpdateError("engine-dead", "the engine has ended", status=500)
                if time.monotonic() > until:
                    message = f"the engine did not answer {operation} within {self._deadline:g} s"
                    raise UpdateError("engine-timeout", message, status=504)
        finally:
            call.cancel()
        try:
            result: dict[str, Any] = call.result()
        except Exception as error:
            raise UpdateError("engine-dead", f"the engine failed: {error}", status=500) from error
        return _unwrapped(result)

    async def job(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Run an operation that may start a job (which may go on in another one), and wait for its result.

        Raises:
            UpdateError: also `engine-timeout`, when no tensor was done for the deadline.
        """
        return await self.ended(operation, await self(operation, **arguments))

    async def ended(self, operation: str, started: dict[str, Any]) -> dict[str, Any]:
        """Wait for the result of an operation that answered this, as `job` does."""
        if "job" not in started:
            return started
        # each poll takes something from the requests beside
        await asyncio.sleep(min(started.get("soonest", 0.0), self._deadline / 2))
        begun, progress, until = time.monotonic(), -1, 0.0
        while True:
            result = await self("poll", job=started["job"])
            if result["done"]:
                result = _unwrapped(result)
                if "job" not in result:
                    return result
                started, begun, progress = result, time.monotonic(), -1
                continue
            if result.get("tensors", 0) != progress:
                progress, until = result.get("tensors", 0), time.monotonic() + self._deadline
            if time.monotonic() > until:
                message = f"{operation}: nothing was done for {self._deadline:g} s"
                raise UpdateError("engine-timeout", message, status=504)
            # what goes on in polls alone, or was waited for in this one, is polled at once: engine steps come in between
            pause = min(_SHORTEST_PAUSE + (time.monotonic() - begun) / 20, _LONGEST_PAUSE)
            await asyncio.sleep(0 if result.get("again") else pause)

    async def sleep(self, level: int, mode: str) -> None:
        """Give memory back (`AsyncLLM.sleep`).

        Raises:
            UpdateError: `sleep-unavailable`.
        """
        if not self._client.vllm_config.model_config.enable_sleep_mode:
            raise UpdateError(
                "sleep-unavailable",
                "this server was started without --enable-sleep-mode: it can't give memory back",
            )
        await self._client.sleep(level, mode)

    async def wake(self, tags: list[str] | None) -> None:
        """Take memory again (`AsyncLLM.wake_up`)."""
        await self._client.wake_up(tags)

    async def patiently(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """`job`, of an operation that may have to wait for running requests, which have a deadline of their own."""
        while True:
            result = await self.job(operation, **arguments)
            if "waiting" not in result:
                return result
            await asyncio.sleep(0.01)


def _unwrapped(result: dict[str, Any]) -> dict[str, Any]:
    if "error" in result:
        raise UpdateError.from_dict(result["error"])
    return result
