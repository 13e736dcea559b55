# SPDX-License-Identifier: Apache-2.0
"""Metrics as a scraper reads them."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_answers import engine_status
from fastapi import FastAPI
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.parser import text_string_to_metric_families

from vllm_fp8ext.serve.metrics import Metrics
from vllm_fp8ext.update.contract.results import EngineStatus
from vllm_fp8ext.update.engine.session import State
from vllm_fp8ext.update.engine.totals import Totals

Sample = tuple[str, tuple[tuple[str, str], ...]]


def status(totals: Totals | None = None, **fields: Any) -> EngineStatus:
    return engine_status(**{"epoch": 3, "totals": (totals or Totals()).as_dict(), **fields})


def scraped(registry: CollectorRegistry) -> dict[Sample, float]:
    """Every sample of the text that a scraper gets, by name and labels."""
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    assert all(family.name.startswith("fp8ext:") and family.documentation for family in families)
    assert all(family.type != "unknown" for family in families)
    samples = [sample for family in families for sample in family.samples]
    result = {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples}
    assert len(result) == len(samples)
    return result


def key(name: str, **labels: str) -> Sample:
    return f"fp8ext:{name}", tuple(sorted(labels.items()))


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> Metrics:
    return Metrics(registry)


def test_before_the_engine_spoke_there_are_refusals_alone(
    registry: CollectorRegistry, metrics: Metrics
) -> None:
    assert scraped(registry) == {}
    for kind in ("wrong-key", "incomplete", "wrong-key"):
        metrics.refused(kind)
    assert scraped(registry) == {
        key("refusals_total", kind="incomplete"): 1,
        key("refusals_total", kind="wrong-key"): 2,
    }


def test_everything_is_there_from_the_start(registry: CollectorRegistry, metrics: Metrics) -> None:
    """An alert on a rate needs a zero to rise from."""
    metrics.observe(status())
    outcomes = ("committed", "abandoned", "expired", "rolled-back")
    assert scraped(registry) == {
        **{key("updates_total", outcome=outcome): 0 for outcome in outcomes},
        key("stall_seconds_count"): 0,
        key("stall_seconds_sum"): 0,
        key("restarted_prompts_total"): 0,
        key("restarted_prompt_tokens_total"): 0,
        key("update_bytes_total"): 0,
        key("epoch"): 3,
        key("poisoned"): 0,
        key("paused_seconds"): 0,
    }


def test_what_the_engine_says_is_told(registry: CollectorRegistry, metrics: Metrics) -> None:
    totals = Totals()
    totals.ended(State.COMMITTED)
    totals.ended("rolled-back")
    totals.took({"pause": 0.25, "prepare": 2.0})
    totals.took({"pause": 0.5})
    totals.stalled(0.125)
    totals.restarted(2, 96)
    totals.bytes = 1 << 40
    error = {"relative": 0.02, "mean": 0.03, "max": 0.5, "worst": "lm_head.weight"}
    fit = {"saturated_fraction": 0.25, "relative_error": 0.026, "headroom": -1.5}
    written = {"saturated_fraction": 0.125, "headroom": -3.0}
    compiled = [{"triton": 4, "torch": 1}, {"triton": 5, "torch": 1}]
    metrics.observe(
        status(
            totals,
            compiled=compiled,
            epoch=7,
            poisoned="rank 1: copy failed",
            last_update={"quantization_error": error},
            kv_scales={
                "age": 2,
                "fit": {"k": fit | {"worst": "l.0"}},
                "traffic": {"k": written | {"worst": "l.0"}},
            },
            kv_layers={"l.0": {"k": fit}},
            kv_traffic={"l.0": {"k": written}},
            draft_acceptance={
                "served": {"epoch": 7, "drafts": 3, "draft_tokens": 12, "accepted_tokens": 5},
                "previous": None,
            },
        )
    )
    result = scraped(registry)
    assert {
        key("updates_total", outcome="committed"): 1,
        key("updates_total", outcome="rolled-back"): 1,
        key("restarted_prompts_total"): 2,
        key("restarted_prompt_tokens_total"): 96,
        key("phase_seconds_count", phase="pause"): 2,
        key("phase_seconds_sum", phase="pause"): 0.75,
        key("phase_seconds_count", phase="prepare"): 1,
        key("phase_seconds_sum", phase="prepare"): 2.0,
        key("stall_seconds_count"): 1,
        key("stall_seconds_sum"): 0.125,
        key("update_bytes_total"): 1 << 40,
        key("epoch"): 7,
        key("poisoned"): 1,
        key("compiled_total", compiler="triton"): 9,
        key("compiled_total", compiler="torch"): 2,
        key("quantization_error", statistic="relative"): 0.02,
        key("quantization_error", statistic="mean"): 0.03,
        key("quantization_error", statistic="max"): 0.5,
        key("kv_scales_age_epochs"): 2,
        key("kv_saturated_fraction", kind="k", layer="l.0"): 0.25,
        key("kv_relative_error", kind="k", layer="worst"): 0.026,
        key("kv_headroom", kind="k", layer="l.0"): -1.5,
        key("kv_traffic_saturated_fraction", kind="k", layer="worst"): 0.125,
        key("kv_traffic_headroom", kind="k", layer="l.0"): -3.0,
        key("draft_tokens", epoch="served", outcome="accepted"): 5,
        key("draft_tokens", epoch="served", outcome="rejected"): 7,
    }.items() <= result.items()
    metrics.observe(status(totals, last_update={"quantization_error": None}))
    assert not any(name == "fp8ext:quantization_error" for name, _ in scraped(registry))


def counters(samples: dict[Sample, float]) -> dict[Sample, float]:
    return {
        sample: count for sample, count in samples.items() if sample[0].endswith(("_total", "_count", "_sum"))
    }


EVENTS = st.one_of(
    st.tuples(st.just("refused"), st.sampled_from(("wrong-key", 'a "b"\\\n'))),
    st.tuples(st.just("ended"), st.sampled_from((*(s for s in State if s.ended), "rolled-back"))),
    st.tuples(st.just("took"), st.dictionaries(st.sampled_from(("pause", "total")), st.floats(0, 9))),
    st.tuples(st.just("stalled"), st.floats(0, 9)),
)


@given(st.lists(EVENTS, max_size=20))
def test_counters_never_fall_or_vanish(events: list[tuple[str, Any]]) -> None:
    registry = CollectorRegistry()
    metrics, totals = Metrics(registry), Totals()
    before: dict[Sample, float] = {}
    for name, argument in events:
        getattr(metrics if name == "refused" else totals, name)(argument)
        metrics.observe(status(totals))
        now = counters(scraped(registry))
        assert before.keys() <= now.keys()
        assert all(now[sample] >= count for sample, count in before.items())
        before = now


@pytest.mark.parametrize("shared", [False, True])
def test_a_server_whose_processes_share_metrics_shows_ours_too(
    shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On vLLM's own `/metrics`, by the way in which vLLM mounts our routes over its own."""
    from vllm.entrypoints.serve.instrumentator.metrics import attach_router
    from vllm.plugins.endpoint_plugins.interface import attach_endpoint_plugins

    monkeypatch.setenv("VLLM_PLUGINS", "fp8ext")
    monkeypatch.setenv("FP8EXT_ADMIN_KEY", "secret")
    if shared:
        monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
        file = MmapedDict(str(tmp_path / f"counter_{os.getpid()}.db"))
        file.write_value(mmap_key("vllm:tokens", "vllm:tokens_total", [], [], "Tokens."), 7.0, 0.0)
        file.close()
    app = FastAPI()
    attach_router(app)
    attach_endpoint_plugins(app, ("generate",))
    [plugin] = app.state.endpoint_plugins
    plugin._backend.metrics.observe(status())
    try:
        answer = TestClient(app).get("/metrics")
    finally:
        REGISTRY.unregister(plugin._backend.metrics)
    assert answer.headers["content-type"] == CONTENT_TYPE_LATEST
    assert "\nfp8ext:epoch 3.0\n" in answer.text
    assert answer.text.count("\nfp8ext:epoch ") == 1
    assert ("\nvllm:tokens_total 7.0\n" in answer.text) == shared


def test_refusals_of_all_processes_are_counted(tmp_path: Path) -> None:
    """Whichever answers. What the engine says is asked for before, unless it is busy or has ended."""
    script = """
import sys
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry
from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.metrics import Metrics, show_where_shared

async def refresh():
    asked.append(1)
    raise UpdateError("engine-dead", "it has ended")

asked, app, metrics = [], FastAPI(), Metrics(CollectorRegistry())
show_where_shared(app, metrics, refresh)
for _ in range(int(sys.argv[1])):
    metrics.refused("wrong-key")
print(TestClient(app).get("/metrics").text, len(asked))
"""
    for count, total in ((2, 2), (3, 5)):
        told = subprocess.run(
            [sys.executable, "-P", "-c", script, str(count)],
            env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        lines = [line for line in told.splitlines() if line.startswith("fp8ext:")]
        assert lines == [f'fp8ext:refusals_total{{kind="wrong-key"}} {total:.1f}']
        assert told.split()[-1] == "1"
