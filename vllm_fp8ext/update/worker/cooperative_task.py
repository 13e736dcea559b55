# SPDX-License-Identifier: Apache-2.0
"""Runs long work in slices between other work of one thread.

The work has a thread of its own for its stack, but never runs beside its caller: each `advance` lends it the turn until it
pauses or ends. What the work may touch is therefore whatever its caller may touch at that point.
"""

import threading
from collections.abc import Callable

from vllm_fp8ext.update.contract.rank_results import RankResult

Pause = Callable[[], None]


class CooperativeTask:
    """Runs one piece of work slice by slice."""

    def __init__(self, work: Callable[[Pause], RankResult]) -> None:
        self._work = work
        self._go = threading.Semaphore(0)
        self._back = threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._closed = False
        self.slices = 0
        """Slices that have run."""
        self.result: RankResult | None = None
        self.error: Exception | None = None

    def advance(self) -> bool:
        """Run one slice; return True when the work is done (`result`, or its `error` is raised), now or before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fp8ext-task", daemon=True)
            self._thread.start()
        if self.result is None and self.error is None:
            self._go.release()
            self._back.acquire()
            self.slices += 1
        if self.error is not None:
            raise self.error
        return self.result is not None

    def close(self) -> None:
        """End work that nobody will advance again."""
        if self._thread is not None and self._thread.is_alive():
            self._closed = True
            self._go.release()
            self._thread.join()

    def _pause(self) -> None:
        self._back.release()
        self._go.acquire()
        if self._closed:
            raise _Closed

    def _run(self) -> None:
        self._go.acquire()
        try:
            self.result = self._work(self._pause)
        except _Closed:
            return
        except Exception as error:
            self.error = error
        self._back.release()


class _Closed(BaseException):
    pass
