# SPDX-License-Identifier: Apache-2.0
"""The Grafana dashboard asks for metrics and labels that a server exports."""

import ast
import importlib.util
import json
import re
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

from engine_answers import engine_status
from prometheus_client import CollectorRegistry

from vllm_fp8ext.serve.metrics import Metrics
from vllm_fp8ext.update.engine.session import State
from vllm_fp8ext.update.engine.totals import Totals

DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana" / "fp8ext.json"
NAME = re.compile(r"\b(?:fp8ext|vllm):[a-z0-9_]+")
SUFFIXES = {"_counter_cls": ("_total",), "_gauge_cls": ("",), "_histogram_cls": ("_bucket", "_sum", "_count")}
SCRAPED = {"job", "instance"}
"""Labels that Prometheus adds to every sample."""


def expressions() -> list[str]:
    """Return every query of the dashboard: of panels, variables and annotations."""
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    queries += [each["definition"] for each in dashboard["templating"]["list"] if "definition" in each]
    return queries + [each["expr"] for each in dashboard["annotations"]["list"]]


@cache
def ours() -> dict[str, set[str]]:
    """Labels of each sample that a server with an FP8 KV cache exports, by name."""
    fit = {"saturated_fraction": 0.0, "relative_error": 0.0, "headroom": 1.0}
    layers: dict[str, Any] = {"l.0": {"k": fit}}
    totals = Totals()
    totals.ended(State.COMMITTED)
    totals.took({"pause": 0.25})
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    metrics.refused("wrong-key")
    metrics.observe(
        engine_status(
            epoch=1,
            totals=totals.as_dict(),
            compiled=[{"triton": 1}],
            last_update={"quantization_error": {"relative": 0.0, "mean": 0.0, "max": 0.0}},
            kv_scales={"age": 0, "fit": layers["l.0"], "traffic": layers["l.0"]},
            kv_layers=layers,
            kv_traffic=layers,
        )
    )
    labels: dict[str, set[str]] = defaultdict(set)
    for family in registry.collect():
        for sample in family.samples:
            labels[sample.name] |= set(sample.labels)
    return labels


@cache
def vllms() -> set[str]:
    """Names of samples that the installed vLLM exports, read from its source."""
    package = importlib.util.find_spec("vllm")
    assert package is not None
    assert package.origin is not None
    source = (Path(package.origin).parent / "v1" / "metrics" / "loggers.py").read_text()
    names = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(attr=kind), keywords=keywords) if kind in SUFFIXES:
                for keyword in keywords:
                    if keyword.arg == "name" and isinstance(keyword.value, ast.Constant):
                        names |= {f"{keyword.value.value}{suffix}" for suffix in SUFFIXES[kind]}
    return names


def test_the_dashboard_asks_for_metrics_that_are_exported() -> None:
    named = {name for query in expressions() for name in NAME.findall(query)}
    assert len(named) > 25
    assert named - ours().keys() - vllms() == set()


def test_every_metric_of_ours_is_on_the_dashboard() -> None:
    named = {name for query in expressions() for name in NAME.findall(query)}
    assert ours().keys() - named == set()


def test_labels_of_our_metrics_are_those_that_they_have() -> None:
    for query in expressions():
        used = {label for group in re.findall(r"\bby \(([^)]*)\)", query) for label in group.split(", ")}
        used |= {
            label for selector in re.findall(r"{([^}]*)}", query) for label in re.findall(r"(\w+)=", selector)
        }
        for name in NAME.findall(query):
            if name in ours():
                assert used <= ours()[name] | SCRAPED, query


def test_panels_lie_apart() -> None:
    places = [panel["gridPos"] for panel in json.loads(DASHBOARD.read_text())["panels"]]
    cells = [
        (x, y)
        for at in places
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells))
    assert all(at["x"] + at["w"] <= 24 for at in places)
