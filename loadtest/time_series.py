# SPDX-License-Identifier: Apache-2.0
"""A run over time, second by second: what plots show."""

from collections import defaultdict
from typing import Any

from vllm_fp8ext.loadtest.latency import gaps, ttft
from vllm_fp8ext.loadtest.records import RunRecords

MOST_POINTS = 600
"""Longer runs are cut into longer bins."""


def series(run: RunRecords) -> dict[str, Any]:
    """Bins of equal width: their begin in seconds of the run, and what happened in each. Gauges are as scraped."""
    width = max(1.0, (run.stop - run.start) / MOST_POINTS)
    count = max(1, int((run.stop - run.start) / width))  # the rest of a bin would look like less
    tokens, worst_gap = [0.0] * count, [0.0] * count
    first: dict[int, list[float]] = defaultdict(list)

    def bin_of(at: float) -> int | None:
        number = int((at - run.start) / width)
        return number if 0 <= number < count else None

    for request in run.requests:
        for at, came in request.events:
            if (number := bin_of(at)) is not None:
                tokens[number] += came / width
        for (at, _), gap in zip(request.events[1:], gaps(request), strict=True):
            if (number := bin_of(at)) is not None:
                worst_gap[number] = max(worst_gap[number], gap)
        waited = ttft(request)
        if waited is not None and (number := bin_of(request.scheduled)) is not None:
            first[number].append(waited)
    return {
        "width": width,
        "at": [number * width for number in range(count)],
        "tokens_per_s": tokens,
        "itl_max": worst_gap,
        "ttft_max": [max(first[number], default=None) for number in range(count)],
        "updates": [
            {"began": u.began - run.start, "committed": u.committed - run.start, "version": u.version}
            for u in run.updates
        ],
        "steps": [{"number": s.number, "ended": s.ended - run.start} for s in run.steps],
        "scrapes": [{"at": scrape.at - run.start, **scrape.values} for scrape in run.scrapes],
    }
