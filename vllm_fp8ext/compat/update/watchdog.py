# SPDX-License-Identifier: Apache-2.0
"""Ends an engine whose workers do not answer, so that nobody waits for it."""

import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn

FEATURE: str = "core"
WHY: str = (
    "End an engine whose worker hangs: vLLM's RPC timeouts leave replies unread that later "
    "calls would take for theirs."
)
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = ()
USES: dict[str, tuple[str, ...]] = {}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM ends an engine by itself when a worker hangs"

logger = logging.getLogger("vllm.fp8ext")

EXIT_CODE = 70
"""EX_SOFTWARE of sysexits.h."""


class Watchdog:
    """Watches a thread of the engine core from another one. `seconds`: the longest time that an operation may take."""

    def __init__(self, seconds: float, executor: Any) -> None:
        self.seconds = seconds
        self._executor = executor
        self._watched: tuple[str, float] | None = None
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def watching(self, operation: str) -> Iterator[None]:
        """End the process unless the context is left in time."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fp8ext-watchdog", daemon=True)
            self._thread.start()
        self._watched = operation, time.monotonic() + self.seconds
        self._wake.set()
        try:
            yield
        finally:
            self._watched = None

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Watch nothing meanwhile; what is watched has all its time again afterwards."""
        watched, self._watched = self._watched, None
        try:
            yield
        finally:
            if watched is not None:
                self._watched = watched[0], time.monotonic() + self.seconds
                self._wake.set()

    def another(self) -> "Watchdog":
        """Return one for another thread of the same engine."""
        return Watchdog(self.seconds, self._executor)

    def end(self, reason: str) -> NoReturn:
        """End the workers and this process at once, with every thread's stack in the log."""
        try:
            logger.critical("fp8ext: %s: the engine ends", reason)
            for worker in getattr(self._executor, "workers", ()):
                process = getattr(worker, "proc", None)
                if process is not None and process.pid:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGKILL)
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
        finally:
            os._exit(EXIT_CODE)

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            while (watched := self._watched) is not None:
                operation, until = watched
                left = until - time.monotonic()
                if left <= 0:
                    self.end(f"{operation} was not done within {self.seconds:g} s")
                time.sleep(min(left, 1.0))
