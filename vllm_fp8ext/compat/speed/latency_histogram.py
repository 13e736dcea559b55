# SPDX-License-Identifier: Apache-2.0
"""Counts equal latencies of tokens at once.

Tokens that came together have one latency, and vLLM observes it once for each of them: a sixth of the time of an API server
that streams nothing.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from typing import Any

import prometheus_client
from vllm.v1.metrics.loggers import PrometheusStatLogger

from vllm_fp8ext.compat.wrapping import wrap

FEATURE: str = "output_interval"
WHY: str = "Observe a latency once for all tokens that have it: vLLM observes each token's."
GAIN: str = "16 % of the API server's process with 128 requests that are not streamed (a CPU)"
REPLACES: tuple[str, ...] = (
    "vllm.v1.metrics.loggers:PrometheusStatLogger.record(scheduler_stats, iteration_stats, engine_idx)",
)
USES: dict[str, tuple[str, ...]] = {
    "count latencies of tokens": ("vllm.v1.metrics.stats:IterationStats",),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM observes a latency for each output"


def install() -> None:
    """Idempotent."""
    wrap(PrometheusStatLogger, "record", _wrap_record)


def observe_all(histogram: Any, values: Iterable[float]) -> None:
    """Observe values in a histogram of `prometheus_client`, equal ones at once."""
    bounds, buckets = histogram._upper_bounds, histogram._buckets
    for value, count in Counter(values).items():
        histogram._sum.inc(value * count)
        buckets[bisect_left(bounds, value)].inc(count)


def _wrap_record(original: Any) -> Any:
    def record(
        self: Any,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
        **others: Any,
    ) -> None:
        latencies = iteration_stats.inter_token_latencies_iter if iteration_stats is not None else []
        histogram = self.histogram_inter_token_latency[engine_idx] if latencies else None
        if type(histogram) is not prometheus_client.Histogram:
            return original(self, scheduler_stats, iteration_stats, mm_cache_stats, engine_idx, **others)
        iteration_stats.inter_token_latencies_iter = []
        try:
            original(self, scheduler_stats, iteration_stats, mm_cache_stats, engine_idx, **others)
        finally:
            iteration_stats.inter_token_latencies_iter = latencies  # other loggers read it, too
        observe_all(histogram, latencies)

    return record
