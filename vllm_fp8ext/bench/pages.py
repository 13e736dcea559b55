# SPDX-License-Identifier: Apache-2.0
"""Pages with tables and pictures that are made from results."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

INK, PAPER, FAINT = "#1b1f24", "#fefefe", "#8c959f"
"""Colours of text, ground and guides in the light theme."""
BLUE, ORANGE = "#2f81f7", "#e8590c"
"""Colours that both themes show well."""
_NIGHT = {INK: "#e6edf3", PAPER: "#0d1117", FAINT: "#6e7681"}
STYLE = {
    "svg.hashsalt": "fp8ext",  # the same picture from the same numbers
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10.5,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "axes.spines.top": False,
    "axes.spines.right": False,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
}
"""Settings of matplotlib for pictures that `save_picture` writes."""


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format cells as a table in Markdown."""
    return "\n".join([_row(titles), "|" + "---|" * len(titles), *map(_row, rows)])


def _row(cells: Sequence[str]) -> str:
    return f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in cells)}|"


def fill(page: Path, tables: Mapping[str, str]) -> None:
    """Put each table between `<!-- NAME -->` and `<!-- /NAME -->`: its marks on the page."""
    text = page.read_text()
    for name, table in tables.items():
        text, count = re.subn(
            rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", rf"\g<1>{table}\n\g<2>", text, flags=re.DOTALL
        )
        assert count == 1, name
    page.write_text(text)


def save_picture(figure: Any, file: Path) -> None:
    """Write a figure of matplotlib as SVG: text and ground follow the reader's light or dark theme."""
    figure.savefig(file, format="svg", metadata={"Date": None})
    file.write_text(themed(file.read_text()))


def themed(svg: str) -> str:
    """Return an SVG whose `INK`, `PAPER` and `FAINT` follow the reader's light or dark theme."""
    for number, day in enumerate(_NIGHT):
        # a viewer that knows no variables takes the first of the two
        svg = re.sub(
            rf"(fill|stroke|background-color|(?<!-)color): ?{day}\b",
            rf"\1: {day}; \1: var(--c{number})",
            svg,
            flags=re.IGNORECASE,
        )
    days = "".join(f"--c{number}:{day};" for number, day in enumerate(_NIGHT))
    nights = "".join(f"--c{number}:{night};" for number, night in enumerate(_NIGHT.values()))
    style = f"<style>svg{{{days}}}@media(prefers-color-scheme:dark){{svg{{{nights}}}}}</style>"
    return re.sub(r"(<svg [^>]*>)", rf"\1\n {style}", svg, count=1)
