# SPDX-License-Identifier: Apache-2.0
"""Threads for the long work of a rank: jobs of one lane run one after the other, beside those of other lanes."""

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
"""How long a thread of this process computes, while lanes work, before another one may. With Python's 5 ms a lane beside an
engine that computes all the time waits up to 5 ms after each call of the driver, of which an update makes hundreds; and the
engine waits as long for a lane."""
QUIET_SECONDS = 0.05
"""After so long without a job a lane does what its jobs have left to do. Closing the handles of a model takes several
milliseconds, in which an update's next job would wait."""

_Job: TypeAlias = tuple[int, Callable[[], RankResult], Callable[[], None] | None]


class Lanes:
    """On a GPU, `device`, each lane has a stream of its own, and a job's result is there when that stream has come so far."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._jobs: dict[str, queue.SimpleQueue[_Job]] = {}
        self._results: dict[int, RankResult] = {}
        self._left: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._finishing = threading.Lock()
        self._told = threading.Condition()
        self._working = 0
        self._usual = sys.getswitchinterval()

    def start(
        self,
        lane: str,
        job: int,
        work: Callable[[], RankResult],
        after: Callable[[], None] | None = None,
    ) -> Accepted:
        """Queue a job; `after` is what is left to do when its result is known: when the lane is quiet, at the latest before
        its next job that leaves something."""
        if lane not in self._jobs:
            self._jobs[lane] = queue.SimpleQueue()
            threading.Thread(
                target=self._run, args=(self._jobs[lane],), name=f"fp8ext-{lane}", daemon=True
            ).start()
        self._jobs[lane].put((job, work, after))
        return Accepted()

    def tell(self, job: int, result: RankResult) -> None:
        """A job has its result."""
        with self._told:
            self._results[job] = result
            self._told.notify_all()

    def take(self, job: int, patience: float | None = 0.0) -> RankResult | None:
        """A job's result, once, after waiting for it so many seconds at most (None: for ever)."""
        with self._told:
            self._told.wait_for(lambda: job in self._results, patience)
            return self._results.pop(job, None)

    @contextmanager
    def _turns(self) -> Iterator[None]:
        """Threads take short turns as long as a lane works."""
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, more: int) -> None:
        with self._told:
            if not self._working:
                self._usual = sys.getswitchinterval()
            self._working += more
            sys.setswitchinterval(min(TURN_SECONDS, self._usual) if self._working else self._usual)

    def _run(self, jobs: queue.SimpleQueue[_Job]) -> None:
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(self._device)
            torch.cuda.set_stream(torch.cuda.Stream(self._device))

        @errors_as_results
        def done(work: Callable[[], RankResult]) -> RankResult:
            try:
                with torch.inference_mode():
                    return work()
            finally:
                if on_gpu:
                    torch.cuda.current_stream().synchronize()

        while True:
            try:
                job, work, after = jobs.get(timeout=None if self._left.empty() else QUIET_SECONDS)
            except queue.Empty:
                self.finish()
                continue
            if after:
                self.finish()
            with self._turns():
                result = done(work)
                if after:  # before anybody knows of the result, and may want to `finish`
                    self._left.put(after)
                self.tell(job, result)

    def finish(self) -> None:
        """Do what jobs that have ended left to do, once. When it returns it is done, by whichever thread."""
        with self._turns(), self._finishing, suppress(queue.Empty):
            while True:
                left = self._left.get_nowait()
                try:
                    left()
                except Exception:
                    logger.exception("fp8ext: what a job left open could not be closed")
