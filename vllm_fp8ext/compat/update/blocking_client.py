# SPDX-License-Identifier: Apache-2.0
"""Calls the engine core of an `LLM`, whose own calls block.

Utility calls are sent as its `call_utility` does, without waiting; two threads may call.
"""

import asyncio
import functools
import threading
import uuid
from concurrent.futures import Future
from typing import Any

from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core_client import SyncMPClient

from vllm_fp8ext.compat.update.engine_shutdown import replace
from vllm_fp8ext.errors import ConfigError

FEATURE: str = "core"
WHY: str = (
    "Call the engine core of an LLM while another thread generates: its client takes one caller at a time."
)
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = ("vllm.v1.engine.core_client:SyncMPClient._send_input(request_type, request)",)
USES: dict[str, tuple[str, ...]] = {
    "call the engine core of an LLM": (
        "vllm.v1.engine.core_client:SyncMPClient.utility_results",
        "vllm.v1.engine.llm_engine:LLMEngine.engine_core",
    ),
    "put an LLM to sleep without waiting for a dead engine": (
        "vllm.v1.engine.llm_engine:LLMEngine.logger_manager",
        "vllm.v1.engine.llm_engine:LLMEngine.renderer",
    ),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "that client has a utility call that does not block"


class BlockingEngine:
    """The parts of an `AsyncLLM` that `EngineCalls` needs, from an `LLM`, until `close`.

    Raises:
        ConfigError: its engine core is not a process of its own.
    """

    def __init__(self, llm: Any) -> None:
        self._engine = llm.llm_engine
        self._core = self._engine.engine_core
        if not isinstance(self._core, SyncMPClient):
            raise ConfigError(
                f"this LLM's engine core runs in the trainer's thread ({type(self._core).__name__}): updates need "
                "one in a process of its own, so leave VLLM_ENABLE_V1_MULTIPROCESSING at 1"
            )
        self.vllm_config = self._engine.vllm_config
        self.engine_core = self
        self.resources = self._core.resources
        self.close = replace(self._core, "_send_input", _wrap_send_input(self._core._send_input))

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        """Call a method of the engine core."""
        result: Future[Any] = Future()
        call_id = uuid.uuid1().int >> 64
        self._core.utility_results[call_id] = result
        self._core._send_input(EngineCoreRequestType.UTILITY, (0, call_id, method, args))
        # vLLM's thread that takes answers ends on one to a future that was cancelled
        return await asyncio.shield(asyncio.wrap_future(result))

    async def sleep(self, level: int, mode: str) -> None:
        """As `LLM.sleep`, which a dead engine would never end."""
        if level >= 1:
            self._engine.renderer.clear_mm_cache()
        await self.call_utility_async("sleep", level, mode)
        self._record_sleep(1, level)

    async def wake_up(self, tags: list[str] | None) -> None:
        """As `LLM.wake_up`, which a dead engine would never end."""
        if await self.call_utility_async("wake_up", tags):
            self._record_sleep(0, 0)

    def _record_sleep(self, asleep: int, level: int) -> None:
        if self._engine.logger_manager is not None:
            self._engine.logger_manager.record_sleep_state(asleep, level)


def _wrap_send_input(send: Any) -> Any:
    lock = threading.Lock()

    @functools.wraps(send)
    def locked(*arguments: Any) -> None:
        with lock:
            send(*arguments)

    return locked
