# SPDX-License-Identifier: Apache-2.0
"""One self-contained HTML page about one or several runs: plots over time with update marks, and tables side by side."""

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from vllm_fp8ext.loadtest.slo import LATENCIES

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1200px; padding: 0 1rem; color: #1b1f24; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; margin: .5rem 0 1rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #d8dee4; text-align: right; }
th:first-child, td:first-child { text-align: left; }
.bad { color: #b42318; font-weight: 600; } .good { color: #1a7f37; } .note { color: #57606a; }
.wide { overflow-x: auto; }
"""
_STATISTICS = ("mean", "p50", "p90", "p99", "p99.9", "max")


def report_in(file: Path) -> dict[str, Any]:
    """A load test's report.

    Raises:
        ValueError: a file that holds none.
    """
    report = json.loads(file.read_text())
    if not isinstance(report, dict) or not report.keys() >= {"options", "provenance"}:
        raise ValueError(f"{file}: expected the report.json of a load test")
    return report


def page(reports: Sequence[dict[str, Any]]) -> str:
    """HTML of `report.json`s. It loads nothing from anywhere."""
    names = _names(reports)
    parts = [_totals(reports, names), _latencies(reports, names)]
    script = True
    for report, name in zip(reports, names, strict=True):
        parts.append(f"<h2>{_text(name)} over time</h2>")
        figure = _figure(report)
        parts.append(
            figure.to_html(full_html=False, include_plotlyjs=script, config={"displayModeBar": False})
        )
        script = False
        parts.append(_updates(report))
    parts.append(_provenance(reports, names))
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Load test</title>'
        f'<link rel="icon" href="data:,"><style>{_STYLE}</style></head>'
        f"<body><h1>Load test</h1>{body}</body></html>\n"
    )


def how_asked(options: dict[str, Any]) -> str:
    """Say what each request of a run asks for, from a report's options."""
    logprobs = options.get("logprobs")
    logprobs_text = "no logprobs" if logprobs is None else f"logprobs {logprobs}"
    return f"temperature {options.get('temperature', 1.0):g}, {logprobs_text}, token ids, streamed"


def _names(reports: Sequence[dict[str, Any]]) -> list[str]:
    labels: list[str] = []
    for number, report in enumerate(reports, 1):
        label = report["options"].get("label") or report["options"]["profile"]
        labels.append(label if label not in labels else f"{label} ({number})")
    return labels


def _figure(report: dict[str, Any]) -> go.Figure:
    data = report["series"]
    titles = (
        "output tokens per second",
        "largest latencies, ms",
        "requests at the server",
        "KV cache in use, %",
    )
    figure = make_subplots(rows=4, cols=1, shared_xaxes=True, subplot_titles=titles, vertical_spacing=0.06)
    scraped = data["scrapes"]
    at = [scrape["at"] for scrape in scraped]

    def line(row: int, name: str, x: list[float], y: list[Any]) -> None:
        figure.add_trace(go.Scatter(x=x, y=y, name=name, mode="lines"), row=row, col=1)

    line(1, "output tok/s", data["at"], data["tokens_per_s"])
    line(2, "inter-token", data["at"], [value * 1e3 for value in data["itl_max"]])
    first = [None if value is None else value * 1e3 for value in data["ttft_max"]]
    line(2, "first token", data["at"], first)
    for name in ("running", "waiting"):
        line(3, name, at, [scrape.get(name) for scrape in scraped])
    usage = [scrape.get("kv_usage") for scrape in scraped]
    line(4, "KV cache", at, [None if value is None else 100 * value for value in usage])
    for update in data["updates"]:
        figure.add_vline(update["committed"], line={"color": "#8250df", "width": 1, "dash": "dot"})
        figure.add_annotation(
            x=update["committed"], y=1.0, yref="paper", text=_text(update["version"]), showarrow=False, textangle=-90,
            yanchor="top", font={"size": 10, "color": "#8250df"},
        )  # fmt: skip
    for title in figure.layout.annotations[: len(titles)]:
        title.update(x=0, xanchor="left", font={"size": 14})
    figure.update_xaxes(title_text="seconds", row=4, col=1)
    figure.update_yaxes(rangemode="tozero")
    figure.update_layout(height=900, margin={"l": 60, "r": 20, "t": 40, "b": 40}, template="plotly_white")
    return figure


def _totals(reports: Sequence[dict[str, Any]], names: list[str]) -> str:
    rows: list[tuple[str, list[str]]] = []

    def row(title: str, values: list[str]) -> None:
        rows.append((title, values))

    measured = [report["measured"] for report in reports]
    row("valid", [_validity(one) for one in measured])
    row("asked", [_text(how_asked(report["options"])) for report in reports])
    row("seconds", [f"{one['seconds']:.1f}" for one in measured])
    row("requests", [f"{one['requests']}, {one['unfinished_requests']} unfinished" for one in measured])
    row("failed", [_text(_errors(one)) for one in measured])
    row("remarks", [_text("; ".join(one.get("remarks", ()))) for one in measured])
    row("output tokens per second", [f"{one['tokens_per_s']:.1f}" for one in measured])
    row("requests per second", [f"{one['requests_per_s']:.2f}" for one in measured])
    row("goodput, requests per second", [f"{one['goodput_per_s']:.2f}" for one in measured])
    row("updates", [f"{len(one['updates'])}, {one['failed_updates']} failed" for one in measured])
    row("longest stall, ms", [f"{one['stall_seconds'] * 1e3:.1f}" for one in measured])
    row("tokens by staleness", [_text(_stale(one["staleness"])) for one in measured])
    for text in dict.fromkeys(verdict["slo"] for report in reports for verdict in report["slos"]):
        row(f"SLO {_text(text)}", [_verdict(report, text) for report in reports])
    return _table(["", *map(_text, names)], [[title, *values] for title, values in rows])


def _latencies(reports: Sequence[dict[str, Any]], names: list[str]) -> str:
    rows = []
    for key, title in LATENCIES.items():
        for report, name in zip(reports, names, strict=True):
            times = report["measured"][key]
            if times.get("count"):
                values = [f"{times[statistic] * 1e3:.1f}" for statistic in _STATISTICS]
                rows.append([title, _text(name), str(times["count"]), *values])
    return "<h2>Latencies, ms</h2>" + _table(["", "run", "count", *_STATISTICS], rows)


def _updates(report: dict[str, Any]) -> str:
    columns = (
        *(
            "version",
            "epoch",
            "push_seconds",
            "stall_seconds",
            "pause_seconds",
            "tokens_lost",
            "recovery_seconds",
        ),
        *("first_new_token_seconds", "running", "mixed", "aborted", "failed", "error"),
    )
    rows = [[_value(update[name]) for name in columns] for update in report["measured"]["updates"]]
    if not rows:
        return ""
    return "<h3>Updates</h3>" + _table([name.replace("_", " ") for name in columns], rows)


def _provenance(reports: Sequence[dict[str, Any]], names: list[str]) -> str:
    keys = ("date", "command", "server", "generator", "python", "versions")
    rows = [[key, *(_text(str(report["provenance"].get(key))) for report in reports)] for key in keys]
    return "<h2>Where it comes from</h2>" + _table(["", *map(_text, names)], rows)


def _validity(measured: dict[str, Any]) -> str:
    if not measured["invalid"]:
        return '<span class="good">yes</span>'
    return f'<span class="bad">no: {_text("; ".join(measured["invalid"]))}</span>'


def _verdict(report: dict[str, Any], text: str) -> str:
    for verdict in report["slos"]:
        if verdict["slo"] == text:
            kind = "good" if verdict["kept"] else "bad"
            return f'<span class="{kind}">{_value(verdict["found"])}</span>'
    return "–"


def _errors(measured: dict[str, Any]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in measured["errors"].items()) or "none"


def _stale(staleness: dict[str, Any]) -> str:
    text = ", ".join(f"{behind}: {count}" for behind, count in staleness["tokens"].items())
    return f"{text}{' (estimated)' if staleness['estimated'] else ''}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th>{cell}</th>" for cell in head)
    lines = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{cells}</tr>{lines}</table></div>'


def _value(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.3f}" if isinstance(value, float) else _text(str(value))


def _text(text: str) -> str:
    return html.escape(text)
