# SPDX-License-Identifier: Apache-2.0
"""Reads the server's `/metrics` while the load runs."""

import time

import gevent
import httpx
from prometheus_client.parser import text_string_to_metric_families

from vllm_fp8ext.loadtest import http_client
from vllm_fp8ext.loadtest.records import ScrapeRecord

NAMES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:prefix_cache_hits_total": "prefix_hits",
    "fp8ext:epoch": "epoch",
}
"""Samples taken, and what a report calls them."""


def parse(text: str) -> dict[str, float]:
    """Sums over labels of the samples in `NAMES`."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in NAMES:
                name = NAMES[sample.name]
                values[name] = values.get(name, 0.0) + sample.value
    return values


def scrape_forever(url: str, every: float, into: list[ScrapeRecord]) -> None:
    """Scrape until killed; a server that does not answer is left out."""
    with http_client.client(timeout=10) as client:
        while True:
            at = time.monotonic()
            try:
                values = parse(client.get(f"{url.rstrip('/')}/metrics").raise_for_status().text)
            except (httpx.HTTPError, ValueError):
                values = {}
            if values:
                into.append(ScrapeRecord(at, values))
            gevent.sleep(max(0.0, at + every - time.monotonic()))
