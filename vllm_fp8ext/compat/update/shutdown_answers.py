# SPDX-License-Identifier: Apache-2.0
"""Answers every request that is still open when a server stops its engine.

Replaces, on an instance, `AsyncLLM.shutdown`: it may cancel the task that tells requests of the end before that task has, and
the server then waits for them to end. Can go once vLLM answers them all.
"""

import asyncio
import contextlib
from typing import Any

from vllm.v1.engine.exceptions import EngineDeadError

from vllm_fp8ext.compat.update.engine_shutdown import replace


def answer_at_the_end(engine_client: Any) -> None:
    """Give each request an error that an `AsyncLLM` has left open when it is shut down. To be called on its event loop."""
    loop, requests = asyncio.get_running_loop(), engine_client.output_processor
    shutdown = engine_client.shutdown

    def shut_down(*arguments: Any, **named: Any) -> None:
        shutdown(*arguments, **named)
        with contextlib.suppress(RuntimeError):  # nobody waits where the loop is closed
            loop.call_soon_threadsafe(requests.propagate_error, EngineDeadError())

    replace(engine_client, "shutdown", shut_down)
