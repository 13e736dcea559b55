# SPDX-License-Identifier: Apache-2.0
"""Rollout steps, as an RL trainer has them: all answers of a step at once, then an update, then the next step.

The first process leads; it, or with several locust processes each of the others, asks its part of the prompts.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from gevent.event import Event
from gevent.queue import Queue
from locust.env import Environment
from locust.runners import MasterRunner

from vllm_fp8ext.loadtest.records import StepRecord

T = TypeVar("T")

BEGIN, DONE = "fp8ext-step", "fp8ext-step-done"
"""Messages: a step `number` begins everywhere at `began`; one process had its last answer of it at `ended`."""
LEAD_SECONDS = 0.05
"""For the first to arrive."""
ASK_SECONDS = 0.5
"""A process that is gone is noticed so soon."""


class Rollouts:
    """One for each process of a run. `parts`: how many processes ask."""

    def __init__(self, environment: Environment, parts: int) -> None:
        assert environment.runner is not None
        self._runner = environment.runner
        self._parts = parts
        self._coming: Queue[dict[str, Any]] = Queue()
        self._ended: list[float] = []
        self._told = Event()
        self._number = 0

    @property
    def led(self) -> bool:
        """Return whether a step has begun."""
        return self._number > 0

    def begun(self, message: dict[str, Any]) -> None:
        """`BEGIN` came."""
        self._coming.put(message)

    def done(self, message: dict[str, Any]) -> None:
        """`DONE` came."""
        if message["number"] == self._number:
            self._ended.append(message["ended"])
            self._told.set()

    def lead(self, steps: int) -> Iterator[StepRecord]:
        """So many steps (0: until the run ends), each when it is over."""
        while not steps or self._number < steps:
            self._number += 1
            self._ended.clear()
            began = time.monotonic() + LEAD_SECONDS
            self._runner.send_message(BEGIN, {"number": self._number, "began": began})
            while len(self._ended) < self._asking():
                self._told.wait(ASK_SECONDS)
                self._told.clear()
            yield StepRecord(self._number, began, max(self._ended, default=time.monotonic()))

    def follow(self, make: Callable[[], T], ask: Callable[[T, int, float], None]) -> None:
        """Run this process's part of every step, for ever. `make` prepares it while nobody waits for it, `ask` sends it,
        given the step's number and begin."""
        while True:
            made = make()
            message = self._coming.get()
            ask(made, message["number"], message["began"])
            self._runner.send_message(DONE, {"number": message["number"], "ended": time.monotonic()})

    def _asking(self) -> int:
        alive = self._runner.worker_count if isinstance(self._runner, MasterRunner) else 1
        return min(self._parts, alive)
