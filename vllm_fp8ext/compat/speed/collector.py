# SPDX-License-Identifier: Apache-2.0
"""Has Python's garbage collector look less often while many requests run.

By default it looks whenever 700 more objects are alive than before: with 128 streams each step makes thousands, all of
which are gone by the next. What it sees alive it soon counts as old, and walks through all that is old, every token of
every running request among it: tens of milliseconds, in which no stream is written and no step begins.
"""

import gc

FEATURE: str = "core"
WHY: str = (
    "Collect garbage less often: vLLM freezes what there is at the start, and keeps Python's thresholds."
)
GAIN: str = "pauses of 20 to 110 ms with 128 streams (a CPU of two cores)"
REPLACES: tuple[str, ...] = ()
USES: dict[str, tuple[str, ...]] = {}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM sets thresholds in its processes"

USUAL = (700, 2000)
"""First thresholds of Python's releases (3.11 to 3.14); another one was set by who knows better."""
THRESHOLD = 25_000
"""Objects after which the youngest are looked at: more than 256 streams make in a step, few enough for some milliseconds."""


def look_less_often() -> None:
    """Set the first threshold of this process. Idempotent; one that is not Python's own stays."""
    first, *others = gc.get_threshold()
    if first in USUAL:
        gc.set_threshold(THRESHOLD, *others)
