# SPDX-License-Identifier: Apache-2.0
"""Percentiles of latencies, from HDR histograms with three digits."""

from collections.abc import Iterable
from itertools import pairwise

from hdrh.histogram import HdrHistogram

from vllm_fp8ext.loadtest.records import RequestRecord

PERCENTILES = (50.0, 90.0, 99.0, 99.9)
_LARGEST_US = 24 * 3600 * 1_000_000


def percentile_name(percentile: float) -> str:
    """`p99`, `p99.9`."""
    return f"p{percentile:g}"


def summary(seconds: Iterable[float]) -> dict[str, float]:
    """Count, mean, largest and percentiles of durations, in seconds; only the count where there are none."""
    histogram = HdrHistogram(1, _LARGEST_US, 3)
    count, total, largest = 0, 0.0, 0.0
    for value in seconds:
        histogram.record_value(max(1, round(value * 1e6)))
        count, total, largest = count + 1, total + value, max(largest, value)
    if not count:
        return {"count": 0}
    percentiles = {
        percentile_name(p): min(histogram.get_value_at_percentile(p) / 1e6, largest) for p in PERCENTILES
    }
    return {"count": count, "mean": total / count, "max": largest, **percentiles}


def ttft(request: RequestRecord) -> float | None:
    """Time to first token, from when the request was to be sent."""
    return None if request.first is None else request.first - request.scheduled


def gaps(request: RequestRecord) -> list[float]:
    """Inter-token latencies: times between parts of the stream that brought tokens."""
    times = [at for at, _ in request.events]
    return [after - before for before, after in pairwise(times)]


def tpot(request: RequestRecord) -> float | None:
    """Time per output token without the first: from the first token's arrival to the last one's, by the tokens between."""
    if request.tokens < 2:
        return None
    return (request.events[-1][0] - request.events[0][0]) / (request.tokens - 1)


def end_to_end(request: RequestRecord) -> float | None:
    """From when the request was to be sent to its last token."""
    return None if not request.events else request.events[-1][0] - request.scheduled
