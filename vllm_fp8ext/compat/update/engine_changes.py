# SPDX-License-Identifier: Apache-2.0
"""Tells every API server process at once what an update has changed.

A process calls `EngineCore.fp8ext_change` with what it knows. The core answers when something else holds: a utility method of
vLLM may return a future.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

FEATURE: str = "core"
WHY: str = "Tell API server processes what another one has changed: vLLM's core sends nothing unasked."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = ()
USES: dict[str, tuple[str, ...]] = {
    "answer a call when something has changed": ("vllm.v1.engine:EngineCoreRequestType.UTILITY",),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM's engine core can send a plugin's messages to its API server processes"

CHANGE = "fp8ext_change"
"""Name of the utility method."""


class EngineChanges:
    """Calls that wait for a change. `current`: what holds now."""

    def __init__(self, current: Callable[[], dict[str, Any]]) -> None:
        self._current = current
        self._waiting: list[tuple[dict[str, Any] | None, Future[dict[str, Any]]]] = []

    def wait(self, known: dict[str, Any] | None) -> "Future[dict[str, Any]]":
        """Return a future of what holds once that is not what the caller knows."""
        future: Future[dict[str, Any]] = Future()
        self._waiting.append((known, future))
        self.tell()
        return future

    def tell(self) -> None:
        """Answer every call whose caller knows something else than what holds."""
        if not self._waiting:
            return
        current = self._current()
        waiting, self._waiting = self._waiting, []
        for known, future in waiting:
            if known == current:
                self._waiting.append((known, future))
            else:
                future.set_result(current)
