# SPDX-License-Identifier: Apache-2.0
"""`fp8ext:…` on the server's `/metrics`: what the engine last said of itself, and what was refused at the door."""

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

from fastapi import FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract.results import EngineStatus

_REFUSALS = "fp8ext:refusals", "Calls refused, by kind of problem."
_SHARED = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable of prometheus_client: the folder through which processes share their metrics."""

_REFRESH_SECONDS = 5.0
"""Longest time that an answer waits for a busy engine: half of what scrapers usually wait."""


def show_where_shared(
    app: FastAPI, metrics: "Metrics", refresh: Callable[[], Awaitable[object]] | None = None
) -> None:
    """Answer `/metrics` with these metrics too, where processes share files of metrics.

    The server makes a registry for each answer then, to which nobody else can add a collector. `refresh` asks the engine
    before: another process may have changed what it says.
    """
    if _SHARED not in os.environ:
        return
    metrics.share_refusals()

    @app.get("/metrics", include_in_schema=False)
    async def scrape() -> Response:
        if refresh is not None:
            with contextlib.suppress(TimeoutError, UpdateError):  # the engine may be busy, or have ended
                async with asyncio.timeout(_REFRESH_SECONDS):
                    await refresh()
        return await asyncio.to_thread(_scrape, metrics)


def _scrape(metrics: "Metrics") -> Response:
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]  # prometheus_client has no types here
    registry.register(metrics)
    return Response(generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


class Metrics:
    """A Prometheus collector."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._status: EngineStatus | None = None
        self._refusals: dict[str, int] = {}
        self._shared_refusals: Counter | None = None
        registry.register(self)

    def share_refusals(self) -> None:
        """Count refusals in a file that other processes read: each counts its own."""
        if self._shared_refusals is None:
            self._shared_refusals = Counter(*_REFUSALS, labelnames=["kind"], registry=None)

    def refused(self, kind: str) -> None:
        """A call was answered with a problem of this kind."""
        if self._shared_refusals is not None:
            self._shared_refusals.labels(kind).inc()
            return
        self._refusals[kind] = self._refusals.get(kind, 0) + 1

    def observe(self, status: EngineStatus) -> None:
        """Take the engine's status (`UpdateEngine.status`)."""
        self._status = status

    def describe(self) -> list[Metric]:
        """Nothing beforehand: collectors that are registered are not collected for their names."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the current values."""
        if self._shared_refusals is None:
            yield self._refused()
        if self._status is None:
            return
        yield from _totals(self._status.totals)
        yield from _served(self._status)
        yield from _kv_cache(self._status)
        last = self._status.last_update
        if last and last["quantization_error"]:
            yield _quantization_error(last["quantization_error"])

    def _refused(self) -> Metric:
        refusals = CounterMetricFamily(*_REFUSALS, labels=["kind"])
        for kind, count in sorted(self._refusals.items()):
            refusals.add_metric([kind], count)
        return refusals


def _totals(totals: Mapping[str, Any]) -> Iterator[Metric]:
    """Yield sums over all updates and rollbacks since the engine started."""
    updates = CounterMetricFamily("fp8ext:updates", "Updates that ended, and rollbacks.", labels=["outcome"])
    for outcome, count in totals["outcomes"].items():
        updates.add_metric([outcome], count)
    yield updates
    phases = SummaryMetricFamily(
        "fp8ext:phase_seconds",
        "Seconds of each phase of committed updates and rollbacks.",
        labels=["phase"],
    )
    for phase, (count, seconds) in totals["phases"].items():
        phases.add_metric([phase], count_value=count, sum_value=seconds)
    yield phases
    stalls = SummaryMetricFamily(
        "fp8ext:stall_seconds",
        "From the pause for a commit to the end of the next engine step, when requests were running.",
    )
    stalls.add_metric([], count_value=totals["stalls"][0], sum_value=totals["stalls"][1])
    yield stalls
    prompts, tokens = totals["restarts"]
    yield CounterMetricFamily(
        "fp8ext:restarted_prompts", "Prompts that met a commit and began again.", value=prompts
    )
    yield CounterMetricFamily(
        "fp8ext:restarted_prompt_tokens",
        "Tokens of those prompts that had been computed, and are computed again.",
        value=tokens,
    )
    yield CounterMetricFamily("fp8ext:update_bytes", "Bytes of committed updates.", value=totals["bytes"])


def _drafts(acceptance: Mapping[str, Any]) -> Metric:
    """Make a metric of drafts by epoch."""
    tokens = GaugeMetricFamily(
        "fp8ext:draft_tokens",
        "Tokens of drafts that the weights of an epoch checked: the served one, and the one before.",
        labels=["epoch", "outcome"],
    )
    for epoch, counts in acceptance.items():
        if counts is not None:
            accepted = counts["accepted_tokens"]
            tokens.add_metric([epoch, "accepted"], accepted)
            tokens.add_metric([epoch, "rejected"], counts["draft_tokens"] - accepted)
    return tokens


def _served(status: EngineStatus) -> Iterator[Metric]:
    """Yield what the engine is now."""
    yield GaugeMetricFamily("fp8ext:epoch", "Epoch that is served.", value=status.epoch)
    poisoned = float(status.poisoned is not None)
    yield GaugeMetricFamily("fp8ext:poisoned", "1 while the engine refuses to generate.", value=poisoned)
    yield GaugeMetricFamily(
        "fp8ext:paused_seconds",
        "How long somebody has paused generation; 0 while it goes on.",
        value=status.paused_seconds or 0.0,
    )
    if status.draft_acceptance is not None:
        yield _drafts(status.draft_acceptance)
    compiled = CounterMetricFamily(
        "fp8ext:compiled",
        "Kernels and graphs that were compiled, by compiler; over all ranks, at the last call to them.",
        labels=["compiler"],
    )
    for compiler in status.compiled[0] if status.compiled else ():
        compiled.add_metric([compiler], sum(rank[compiler] for rank in status.compiled))
    yield compiled


def _quantization_error(last: Mapping[str, Any]) -> Metric:
    error = GaugeMetricFamily(
        "fp8ext:quantization_error",
        "Relative quantization error of the last update, over tensors.",
        labels=["statistic"],
    )
    for statistic in ("relative", "mean", "max"):
        error.add_metric([statistic], last[statistic])
    return error


_FITS = {
    "saturated_fraction": "Part of K or V beyond the largest FP8 code, of the tokens that were looked at before the commit.",
    "relative_error": "Relative quantization error of K or V of those tokens.",
    "headroom": "Powers of two from the largest K or V of those tokens to the largest FP8 code.",
}

_TRAFFIC = {
    "saturated_fraction": "Part of K or V beyond the largest FP8 code, of what was cached before the last update.",
    "headroom": "Powers of two from the largest K or V of that to the largest FP8 code.",
}


def _kv_cache(status: EngineStatus) -> Iterator[Metric]:
    """Scales of the FP8 KV cache: by layer, and with layer `worst` for all."""
    kv_scales = status.kv_scales
    if not kv_scales:
        return
    age = "Commits and rollbacks since the weights for which the KV-cache scales were computed."
    yield GaugeMetricFamily("fp8ext:kv_scales_age_epochs", age, value=kv_scales["age"])
    yield from _by_layer("kv", _FITS, status.kv_layers, kv_scales["fit"])
    yield from _by_layer("kv_traffic", _TRAFFIC, status.kv_traffic, kv_scales["traffic"])


def _by_layer(
    prefix: str, meanings: Mapping[str, str], layers: Mapping[str, Any], worst: Mapping[str, Any] | None
) -> Iterator[Metric]:
    layers = {**layers, **({"worst": worst} if worst else {})}
    for name, meaning in meanings.items():
        gauge = GaugeMetricFamily(f"fp8ext:{prefix}_{name}", meaning, labels=["kind", "layer"])
        for layer, kinds in layers.items():
            for kind, statistics in kinds.items():
                gauge.add_metric([kind, layer], statistics[name])
        yield gauge
