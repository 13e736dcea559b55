# SPDX-License-Identifier: Apache-2.0
"""Spreads work over time: the engine beside it is slowed a little for a while, not much for a moment."""

import time
from collections.abc import Callable


class RateLimiter:
    """Lets at most `rate` bytes a second pass; any number with 0.

    `require_wanted` raises once nobody wants the work any more.
    """

    def __init__(self, rate: float, require_wanted: Callable[[], None] = lambda: None) -> None:
        self.unlimited = not rate
        self._rate = rate
        self._require_wanted = require_wanted
        self._start = time.monotonic()
        self._bytes = 0

    def wait(self, size: int) -> None:
        """Wait until so many bytes more, which are queued, may be on their way."""
        self._bytes += size
        if not self.unlimited:
            time.sleep(max(0.0, self._start + self._bytes / self._rate - time.monotonic()))
        self._require_wanted()
