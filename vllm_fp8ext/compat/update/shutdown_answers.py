# SPDX-License-Identifier: Apache-2.0
"""Answers every request that is still open when a server stops its engine.

vLLM may cancel the task that tells requests of the end before that task has, and the server then waits for them to end.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from vllm.v1.engine.exceptions import EngineDeadError

from vllm_fp8ext.compat.update.engine_shutdown import replace

FEATURE: str = "core"
WHY: str = "Answer open requests when a server ends: vLLM leaves some waiting."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = ("vllm.v1.engine.async_llm:AsyncLLM.shutdown(timeout)",)
USES: dict[str, tuple[str, ...]] = {
    "answer open requests when a server ends": (
        "vllm.v1.engine.output_processor:OutputProcessor.propagate_error(e)",
    ),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM answers them all"


def answer_at_the_end(engine_client: Any, before: Callable[[float], object] | None = None) -> None:
    """Give each request an error that is open when an `AsyncLLM` shuts down.

    To be called on its event loop. `before` is called with the seconds that a shutdown may take, on the thread that vLLM
    uses for it.
    """
    loop, requests = asyncio.get_running_loop(), engine_client.output_processor
    shutdown = engine_client.shutdown

    def shut_down(*arguments: Any, **named: Any) -> None:
        if before is not None and named.get("timeout") and not _on_event_loop():
            before(named["timeout"])
        shutdown(*arguments, **named)
        with contextlib.suppress(RuntimeError):  # nobody waits where the loop is closed
            loop.call_soon_threadsafe(requests.propagate_error, EngineDeadError())

    replace(engine_client, "shutdown", shut_down)


def _on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
