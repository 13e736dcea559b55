# SPDX-License-Identifier: Apache-2.0
"""Pages with tables that are made from results."""

import re
from collections.abc import Mapping
from pathlib import Path


def fill(page: Path, tables: Mapping[str, str]) -> None:
    """Put each table between `<!-- NAME -->` and `<!-- /NAME -->`, each of which the page has once."""
    text = page.read_text()
    for name, table in tables.items():
        text, count = re.subn(
            rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", rf"\g<1>{table}\n\g<2>", text, flags=re.DOTALL
        )
        assert count == 1, name
    page.write_text(text)
