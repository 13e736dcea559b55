# SPDX-License-Identifier: Apache-2.0
"""Pages with tables that are made from results."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path


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
