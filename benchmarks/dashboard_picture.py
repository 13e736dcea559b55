# SPDX-License-Identifier: Apache-2.0
"""Draw the panels of the Grafana dashboard from a Prometheus: what the dashboard shows, without a Grafana.

    prometheus --config.file examples/grafana/prometheus.yml
    python benchmarks/dashboard_picture.py --minutes 3

Prints panels whose queries have no data.
"""

import argparse
import json
import math
import re
import time
from pathlib import Path
from typing import Any

import httpx
import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vllm_fp8ext.bench.pages import BLUE, FAINT, ORANGE, STYLE

ROOT = Path(__file__).parents[1]
DASHBOARD = ROOT / "examples" / "grafana" / "fp8ext.json"
STEP_SECONDS = 5
UNITS = {"s": "s", "Bps": "B/s", "ops": "per second", "percentunit": "share", "short": ""}
COLORS = (BLUE, ORANGE, "#1a7f37", "#8250df", "#bf8700", "#0598bc", "#cf222e", FAINT)
Series = list[tuple[str, list[int], list[float]]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Draw the panels of the Grafana dashboard from a Prometheus."
    )
    parser.add_argument("--url", default="http://127.0.0.1:9090", help="the Prometheus")
    parser.add_argument("--minutes", type=float, default=5.0, help="how far back")
    parser.add_argument(
        "--rows", nargs="*", default=[], help="titles of the rows that are drawn; all by default"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "dashboard.png")
    options = parser.parse_args()
    panels = shown(json.loads(DASHBOARD.read_text())["panels"], options.rows)
    with matplotlib.rc_context({**STYLE, "font.size": 8}), httpx.Client(base_url=options.url) as prometheus:
        figure, empty = draw(panels, prometheus, options.minutes)
        figure.savefig(options.out, dpi=80)
    print(f"{options.out}: {len(panels)} panels, without data: {', '.join(empty) or 'none'}")


def shown(panels: list[dict[str, Any]], rows: list[str]) -> list[dict[str, Any]]:
    """Return the panels below these rows, moved up so that none is missed."""
    result: list[dict[str, Any]] = []
    row, gap = "", 0
    for panel in panels:
        if panel["type"] == "row":
            row = panel["title"]
        if rows and row not in rows:
            gap = panel["gridPos"]["y"] + panel["gridPos"]["h"] - _height(result)
        else:
            at = panel["gridPos"]
            result.append({**panel, "gridPos": {**at, "y": at["y"] - gap}})
    return result


def _height(panels: list[dict[str, Any]]) -> int:
    return max((panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels), default=0)


def draw(panels: list[dict[str, Any]], prometheus: httpx.Client, minutes: float) -> tuple[Figure, list[str]]:
    """Draw panels where their dashboard places them; also return titles of those without data."""
    height, empty = _height(panels), []
    figure = pyplot.figure(figsize=(14, 0.29 * height))
    for panel in panels:
        at = panel["gridPos"]
        top = 1 - at["y"] / height
        if panel["type"] == "row":
            figure.text(0.01, top - 0.6 / height, panel["title"], fontsize=11, fontweight="bold", va="center")
            continue
        place = (at["x"] / 24 + 0.045, top - (at["h"] - 2.6) / height)
        axis = figure.add_axes((*place, at["w"] / 24 - 0.06, (at["h"] - 4.2) / height))
        axis.set_title(panel["title"], loc="left", fontsize=9)
        axis.set_xlim(-60 * minutes, 0)
        lines = [line for target in panel["targets"] for line in query(prometheus, target, minutes)]
        if not lines:
            empty.append(panel["title"])
        (_stat if panel["type"] == "stat" else _lines)(axis, lines, panel)
    return figure, empty


def query(prometheus: httpx.Client, target: dict[str, Any], minutes: float) -> Series:
    """Return name, seconds before now and values of each series of a query."""
    words = {
        "$job": ".*",
        "$instance": ".*",
        "$__rate_interval": f"{4 * STEP_SECONDS}s",
        "$__range": f"{60 * minutes:.0f}s",
        "$__interval": f"{STEP_SECONDS}s",
    }
    text = re.sub(r"\$\w+", lambda word: words[word[0]], target["expr"])
    end = time.time()
    answer = prometheus.get(
        "/api/v1/query_range",
        params={"query": text, "start": end - 60 * minutes, "end": end, "step": STEP_SECONDS},
    ).raise_for_status()
    result: Series = []
    for series in answer.json()["data"]["result"]:
        name = _legend(target["legendFormat"], series["metric"])
        values = {round(at - end): float(value) for at, value in series["values"]}
        if any(value == value for value in values.values()):  # not all of them NaN
            seconds = range(min(values), max(values) + 1, STEP_SECONDS)
            result.append((name, list(seconds), [values.get(at, math.nan) for at in seconds]))
    return result


def _legend(form: str, labels: dict[str, str]) -> str:
    return re.sub(r"{{(\w+)}}", lambda word: labels.get(word[1], ""), form)


def _lines(axis: Axes, series: Series, panel: dict[str, Any]) -> None:
    for number, (name, seconds, values) in enumerate(series):
        axis.plot(seconds, values, linewidth=1.1, color=COLORS[number % len(COLORS)], label=name)
    axis.set_ylabel(UNITS[panel["fieldConfig"]["defaults"].get("unit", "short")], fontsize=7)
    top = max((value for _, _, values in series for value in values if value == value), default=0.0) or 1.0
    axis.set_ylim(-0.03 * top, 1.1 * top)
    start = axis.get_xlim()[0]
    axis.set_xticks(
        [start, start * 2 / 3, start / 3, 0],
        [f"{start:.0f} s", *(f"{start * part / 3:.0f} s" for part in (2, 1)), "now"],
    )
    axis.grid(axis="y", color=FAINT, linewidth=0.3)
    if series:
        axis.legend(
            frameon=False, fontsize=6.5, ncols=6, loc="upper left", bbox_to_anchor=(-0.05, -0.24),
            handlelength=1, columnspacing=1, borderaxespad=0,
        )  # fmt: skip


def _stat(axis: Axes, series: Series, panel: dict[str, Any]) -> None:
    unit = UNITS[panel["fieldConfig"]["defaults"].get("unit", "short")]
    text = "\n".join(f"{values[-1]:.3g}{unit and ' ' + unit}  {name}" for name, _, values in series)
    axis.text(0, 0.5, text or "no data", ha="left", va="center", fontsize=13, transform=axis.transAxes)
    axis.set_axis_off()


if __name__ == "__main__":
    main()
