# SPDX-License-Identifier: Apache-2.0
"""One self-contained HTML page with the curves of runs of reinforcement learning. Needs plotly."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

TITLES = {
    "reward": "Reward: share of right answers",
    "mismatch_kl": "KL of server and trainer (k3), nats a token",
    "ess": "Effective sample size, share of tokens",
    "entropy": "Entropy, nats a token",
}
"""Titles of the panels, by curve."""
COLOURS = ("#57606a", "#cf222e", "#bf8700", "#0969da", "#1a7f37", "#8250df", "#bc4c00", "#0e8a8a")
SMOOTHED = 5
"""Steps whose mean a point shows."""


def page(cases: Sequence[Mapping[str, Any]]) -> str:
    """Return HTML that loads nothing from anywhere: a line is the median of a variant's seeds, its band their range.

    Args:
        cases: as `fp8ext demo rl` writes them.
    """
    figure = make_subplots(rows=2, cols=2, subplot_titles=list(TITLES.values()), vertical_spacing=0.12)
    for number, name in enumerate(dict.fromkeys(case["variant"] for case in cases)):
        colour = COLOURS[number % len(COLOURS)]
        for panel, curve in enumerate(TITLES):
            runs = [smoothed(case[curve]) for case in cases if case["variant"] == name]
            place = {"row": panel // 2 + 1, "col": panel % 2 + 1}
            _draw(figure, name, runs, colour, place, legend=panel == 0)
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(type="log", exponentformat="power", row=1, col=2)
    figure.update_layout(
        template="plotly_white", height=820, title="Reinforcement learning through a real server"
    )
    html: str = figure.to_html(include_plotlyjs=True, config={"displaylogo": False})
    return html


def _draw(
    figure: go.Figure, name: str, runs: list[list[float]], colour: str, place: dict[str, int], *, legend: bool
) -> None:
    columns = list(zip(*runs, strict=False))
    steps = list(range(len(columns)))
    low, high = ([edge(column) for column in columns] for edge in (min, max))
    if len(runs) > 1:
        band = {
            "x": [*steps, *reversed(steps)],
            "y": [*high, *reversed(low)],
            "fill": "toself",
            "hoverinfo": "skip",
        }
        figure.add_scatter(
            **band, line_width=0, fillcolor=colour, opacity=0.15, legendgroup=name, showlegend=False, **place
        )
    middle = [statistics.median(column) for column in columns]
    figure.add_scatter(
        x=steps,
        y=middle,
        name=name,
        line_color=colour,
        legendgroup=name,
        showlegend=legend,
        mode="lines",
        **place,
    )


def smoothed(curve: Sequence[float]) -> list[float]:
    """Return means of each value and those before it, `SMOOTHED` together."""
    return [statistics.fmean(curve[max(0, end - SMOOTHED) : end]) for end in range(1, len(curve) + 1)]
