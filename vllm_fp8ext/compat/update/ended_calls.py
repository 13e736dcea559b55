# SPDX-License-Identifier: Apache-2.0
"""Ends calls of an engine that has ended: vLLM's clients wait for their answers for ever.

A trainer's `collective_rpc` is one, in which workers wait for tensors when the trainer's other process is killed.
"""

import asyncio
import contextlib
from concurrent.futures import Future, InvalidStateError
from typing import Any

from vllm.v1.engine.core_client import MPClient
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_fp8ext.compat.wrapping import wrap

FEATURE: str = "core"
WHY: str = "Raise where a call waits for an engine that has ended: vLLM's clients leave it waiting."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = ("vllm.v1.engine.core_client:MPClient.shutdown",)
USES: dict[str, tuple[str, ...]] = {
    "raise where a call waits for an engine that has ended": (
        "vllm.v1.engine.core_client:MPClient.utility_results",
    ),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM's clients end their calls when the engine has ended"


def install() -> None:
    """Idempotent."""
    wrap(MPClient, "shutdown", _wrap_shutdown)


def _wrap_shutdown(original: Any) -> Any:
    """A client's monitor calls it when a process of the engine has ended; no answer comes after it."""

    def shutdown(self: Any, *arguments: Any, **named: Any) -> None:
        try:
            original(self, *arguments, **named)
        finally:
            for future in list(self.utility_results.values()):
                _end(future)

    return shutdown


def _end(future: "Future[Any] | asyncio.Future[Any]") -> None:
    if isinstance(future, Future):
        _fail(future)
    else:
        with contextlib.suppress(RuntimeError):  # its loop is closed, and nobody waits
            future.get_loop().call_soon_threadsafe(_fail, future)


def _fail(future: "Future[Any] | asyncio.Future[Any]") -> None:
    with contextlib.suppress(InvalidStateError, asyncio.InvalidStateError):  # answered, or cancelled
        future.set_exception(EngineDeadError())
