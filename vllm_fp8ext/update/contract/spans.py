# SPDX-License-Identifier: Apache-2.0
"""Times in which something went on, of which those that overlap count once."""

from bisect import bisect_left, bisect_right


class Spans:
    """Times by one clock, merged where they touch. `seconds`: how long they are together."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._starts: list[float] = []
        self._stops: list[float] = []

    def add(self, start: float, stop: float) -> None:
        """Add the time from `start` to `stop`, in seconds, in any order."""
        first, last = bisect_left(self._stops, start), bisect_right(self._starts, stop)
        if first < last:
            start, stop = min(start, self._starts[first]), max(stop, self._stops[last - 1])
        merged = zip(self._starts[first:last], self._stops[first:last], strict=True)
        self.seconds += (stop - start) - sum(after - before for before, after in merged)
        self._starts[first:last], self._stops[first:last] = [start], [stop]
