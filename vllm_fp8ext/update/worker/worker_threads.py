# SPDX-License-Identifier: Apache-2.0
"""Threads for the long work of a rank.

Jobs of one thread run one after the other, beside those of other threads.
"""

import logging
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeAlias

import torch

from vllm_fp8ext.errors import errors_as_results
from vllm_fp8ext.update.contract.rank_results import Accepted, RankResult

logger = logging.getLogger("vllm.fp8ext")

TURN_SECONDS = 0.0005
"""Seconds that a thread of this process computes, while workers work, before another one may.

With Python's 5 ms a worker beside an engine that computes all the time waits up to 5 ms after each call of the driver, of
which an update makes hundreds; and the engine waits as long for a worker.
"""
QUIET_SECONDS = 0.05
"""Seconds without a job after which a worker runs its jobs' cleanups.

Closing the handles of a model takes several milliseconds, in which an update's next job would wait.
"""

_Job: TypeAlias = tuple[int, Callable[[], RankResult], Callable[[], None] | None]


class WorkerThreads:
    """Runs jobs on named threads.

    On a GPU, `device`, each thread has a stream of its own, and a job's result is there when that stream has come so far.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._jobs: dict[str, queue.SimpleQueue[_Job]] = {}
        self._results: dict[int, RankResult] = {}
        self._cleanups: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._cleaning = threading.Lock()
        self._changed = threading.Condition()
        self._working = 0
        self._usual_turn = sys.getswitchinterval()

    def start(
        self,
        thread: str,
        job: int,
        work: Callable[[], RankResult],
        cleanup: Callable[[], None] | None = None,
    ) -> Accepted:
        """Queue a job.

        `cleanup` runs when the result is known: when the thread is quiet, at the latest before its next job with a cleanup.
        """
        if thread not in self._jobs:
            self._jobs[thread] = queue.SimpleQueue()
            threading.Thread(
                target=self._run, args=(self._jobs[thread],), name=f"fp8ext-{thread}", daemon=True
            ).start()
        self._jobs[thread].put((job, work, cleanup))
        return Accepted()

    def set_result(self, job: int, result: RankResult) -> None:
        """Set the result of a job."""
        with self._changed:
            self._results[job] = result
            self._changed.notify_all()

    def take_result(self, job: int, patience: float | None = 0.0) -> RankResult | None:
        """Return a job's result, once; wait for it so many seconds at most (None: for ever)."""
        with self._changed:
            self._changed.wait_for(lambda: job in self._results, patience)
            return self._results.pop(job, None)

    @contextmanager
    def _short_turns(self) -> Iterator[None]:
        """Let threads take short turns as long as one of them works."""
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, more: int) -> None:
        with self._changed:
            if not self._working:
                self._usual_turn = sys.getswitchinterval()
            self._working += more
            sys.setswitchinterval(min(TURN_SECONDS, self._usual_turn) if self._working else self._usual_turn)

    def _run(self, jobs: queue.SimpleQueue[_Job]) -> None:
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(self._device)
            torch.cuda.set_stream(torch.cuda.Stream(self._device))

        @errors_as_results
        def run(work: Callable[[], RankResult]) -> RankResult:
            try:
                with torch.inference_mode():
                    return work()
            finally:
                if on_gpu:
                    torch.cuda.current_stream().synchronize()

        while True:
            try:
                job, work, cleanup = jobs.get(timeout=None if self._cleanups.empty() else QUIET_SECONDS)
            except queue.Empty:
                self.run_cleanups()
                continue
            if cleanup:
                self.run_cleanups()
            with self._short_turns():
                result = run(work)
                if cleanup:  # before anybody knows of the result, and may call `run_cleanups`
                    self._cleanups.put(cleanup)
                self.set_result(job, result)

    def run_cleanups(self) -> None:
        """Run the cleanups of jobs that have ended, once. When it returns they have run, on whichever thread."""
        with self._short_turns(), self._cleaning, suppress(queue.Empty):
            while True:
                cleanup = self._cleanups.get_nowait()
                try:
                    cleanup()
                except Exception:
                    logger.exception("fp8ext: what a job left open could not be closed")
