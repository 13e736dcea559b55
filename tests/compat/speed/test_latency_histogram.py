# SPDX-License-Identifier: Apache-2.0
"""Latencies that are counted at once, against one observation each."""

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Histogram
from vllm.v1.metrics.stats import IterationStats

from vllm_fp8ext.compat.speed import latency_histogram

BUCKETS = (0.01, 0.025, 0.05, 0.1)
VALUES = [0.007] * 16 + [0.01] * 3 + [0.0101] + [0.1] * 2 + [7.0] * 4 + [0.0]


def histogram() -> Histogram:
    return Histogram("latency", "of tokens", buckets=BUCKETS, registry=CollectorRegistry())


def samples(made: Histogram) -> dict[tuple[str, str], float]:
    return {
        (sample.name, sample.labels.get("le", "")): pytest.approx(sample.value)
        for metric in made.collect()
        for sample in metric.samples
        if not sample.name.endswith("_created")
    }


def test_counts_and_sums_are_those_of_single_observations() -> None:
    one, at_once = histogram(), histogram()
    for value in VALUES:
        one.observe(value)
    latency_histogram.observe_all(at_once, VALUES)
    assert samples(at_once) == samples(one)


@pytest.mark.parametrize("kind", ["prometheus", "another"])
def test_the_logger_counts_each_token(kind: str) -> None:
    """Another kind of histogram, as Ray's, is left to vLLM."""
    observed = histogram()
    kept: Any = observed if kind == "prometheus" else SimpleNamespace(observe=observed.observe)
    stats = IterationStats()
    stats.inter_token_latencies_iter = list(VALUES)

    def original(self: Any, scheduler: Any, iteration: Any, cache: Any, engine: int) -> None:
        for value in iteration.inter_token_latencies_iter:
            self.histogram_inter_token_latency[engine].observe(value)

    logger = SimpleNamespace(histogram_inter_token_latency={3: kept})
    latency_histogram._wrap_record(original)(logger, None, stats, engine_idx=3)
    expected = histogram()
    for value in VALUES:
        expected.observe(value)
    assert samples(observed) == samples(expected)
    assert stats.inter_token_latencies_iter == VALUES


def test_a_message_without_tokens_is_left_to_vllm() -> None:
    told: list[Any] = []
    record = latency_histogram._wrap_record(lambda *arguments: told.append(arguments))
    record(SimpleNamespace(), "scheduler", None, engine_idx=0)
    assert told[0][1:] == ("scheduler", None, None, 0)
