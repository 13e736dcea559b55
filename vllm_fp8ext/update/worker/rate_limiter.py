# SPDX-License-Identifier: Apache-2.0
"""Spreads work over time, so that the engine beside it is slowed a little for a while instead of much for a moment."""

import time
from collections.abc import Callable


class Pace:
    """At most `rate` bytes a second, or as fast as it goes with 0. `wanted` raises once nobody wants the work any more."""

    def __init__(self, rate: float, wanted: Callable[[], None] = lambda: None) -> None:
        self.unlimited = not rate
        self._rate = rate
        self._wanted = wanted
        self._begun = time.monotonic()
        self._bytes = 0

    def did(self, size: int) -> None:
        """So many bytes more are on their way: wait until that many may be."""
        self._bytes += size
        if not self.unlimited:
            time.sleep(max(0.0, self._begun + self._bytes / self._rate - time.monotonic()))
        self._wanted()
