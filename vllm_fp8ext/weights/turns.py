# SPDX-License-Identifier: Apache-2.0
"""Who computes in Python: the thread that steps the engine first, lanes while it waits for the GPU.

Only one thread of a process computes at a time, and each call of a driver or of torch passes the turn on. A lane beside an
engine's thread therefore costs it many short waits in every step, at the end of which the GPU has nothing to do; while a
decode step computes, the engine's thread waits anyway.
"""

import threading
import time

LONGEST_SECONDS = 0.002
"""For which a lane waits before a piece of its work: an engine that never waits holds up no update."""
STEP_SECONDS = 0.02
"""An engine's thread that has not waited for so long has no steps, or long ones."""


class Turns:
    """One for each process (`turns`). Nobody waits where nobody takes turns."""

    def __init__(self) -> None:
        self._free = threading.Event()
        self._free.set()
        self._taken = -STEP_SECONDS

    def take(self) -> None:
        """The engine's thread computes."""
        self._taken = time.monotonic()
        self._free.clear()

    def give(self) -> None:
        """It waits."""
        self._free.set()

    def wait(self) -> None:
        """A lane is about to compute a little: let an engine's thread that computes go first."""
        if time.monotonic() < self._taken + STEP_SECONDS:
            self._free.wait(LONGEST_SECONDS)


turns = Turns()
