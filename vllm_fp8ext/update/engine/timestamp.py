# SPDX-License-Identifier: Apache-2.0
"""A time by two clocks."""

import time
from typing import NamedTuple, Self


class Moment(NamedTuple):
    """`monotonic`: seconds by the clock that lifetimes are counted with, which nobody sets. `unix`: what answers show."""

    monotonic: float
    unix: float

    @classmethod
    def now(cls) -> Self:
        return cls(time.monotonic(), time.time())

    def later(self, seconds: float) -> "Moment":
        """So many seconds after it."""
        return Moment(self.monotonic + seconds, self.unix + seconds)
