# SPDX-License-Identifier: Apache-2.0
"""A picture of the mismatch over a run, from what `log_mismatch` returned in each step. Needs plotly."""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_fp8ext.trainer.mismatch import PREFIX

PANELS = {
    "KL of server and trainer, nats a token": ("kl_k1", "kl_k3"),
    "Effective sample size, share of tokens": ("effective_sample_size", "corrected_sample_size"),
    "Largest ratio": ("largest_ratio",),
    "Clipped tokens, share": ("clipped_share",),
    "KL (k3) by position": ("position_*/kl_k3",),
    "KL (k3) by age of weights": ("epochs_behind_*/kl_k3",),
}
"""Titles of the panels and the names that each one draws, a line for each."""
COLUMNS = 2


def plot_mismatch(history: Sequence[Mapping[str, Any]], *, warn_kl: float | None = None) -> Any:
    """Draw the measures of a run over its steps.

    Args:
        history: what `log_mismatch` returned, in order. `step` in an entry is its place on the x axis, else its index is.
            Entries without measures are left out, so that a trainer's whole log may come.
        warn_kl: a line in the first panel.

    Returns:
        A `plotly.graph_objects.Figure`; `write_html` and `show` are its own.

    Raises:
        ModuleNotFoundError: plotly is not installed.
        ValueError: No entry has measures.
    """
    make_subplots = _plotly().make_subplots
    entries = [(entry.get("step", index), entry) for index, entry in enumerate(history)]
    entries = [(step, entry) for step, entry in entries if entry.get(f"{PREFIX}kl_k3") is not None]
    if not entries:
        raise ValueError(
            f"history: expected at least one entry with {PREFIX}kl_k3, found none in {len(history)} entries"
        )
    names = list(dict.fromkeys(name for _, entry in entries for name in entry))
    figure = make_subplots(rows=-(-len(PANELS) // COLUMNS), cols=COLUMNS, subplot_titles=list(PANELS))
    for panel, patterns in enumerate(PANELS.values()):
        place = {"row": panel // COLUMNS + 1, "col": panel % COLUMNS + 1}
        for name in (name for pattern in patterns for name in names if _matches(name, pattern)):
            points = [(step, entry[name]) for step, entry in entries if entry.get(name) is not None]
            steps, values = zip(*points, strict=True)
            figure.add_scatter(
                x=steps, y=values, name=name.removeprefix(PREFIX), mode="lines+markers", **place
            )
    if warn_kl is not None:
        figure.add_hline(y=warn_kl, line_dash="dash", row=1, col=1)
    return figure.update_layout(template="plotly_white", height=900)


def _matches(name: str, pattern: str) -> bool:
    """Tell whether a measure has this name; a `*` stands for what has no slash."""
    before, star, after = pattern.partition("*")
    if not star:
        return name == PREFIX + pattern
    inner = name.removeprefix(PREFIX + before).removesuffix(after)
    return name == f"{PREFIX}{before}{inner}{after}" and "/" not in inner


def _plotly() -> Any:
    try:
        import plotly.subplots
    except ModuleNotFoundError as error:
        message = "plot_mismatch: expected plotly, found none: pip install 'vllm-fp8ext[loadtest]'"
        raise ModuleNotFoundError(message, name="plotly") from error
    return plotly.subplots
