# SPDX-License-Identifier: Apache-2.0
"""The tables of `docs/models.md` from the results of `scripts/model-zoo`.

python benchmarks/models_page.py
"""

import json
from pathlib import Path
from typing import Any

from vllm_fp8ext.bench import pages

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "models.md"
RESULT = ROOT / "benchmarks" / "results" / "zoo_cpu.json"
Cases = list[dict[str, Any]]

TITLES = {
    "dense": "dense",
    "experts": "mixtures of experts",
    "hybrid": "hybrids",
    "tower": "with a tower for images",
    "pooling": "reward models and classifiers",
}
"""Headings of the kinds, in the order of the page."""
COLUMNS = {
    "starts": ("started", "generates"),
    "update = cold start": ("digests of a cold start", "floats of a cold start"),
    "rollback": ("rolled back",),
    "bad input refused": (
        *("NaN refused by name", "missing refused by name"),
        *("untouched by refusals", "served as before"),
    ),
    "partial": ("partial",),
    "images": ("images are seen", "images of a cold start"),
    "states": (
        *("states are cached", "cached states stay in their epoch", "cached states do not come back"),
        *("recompute makes states anew", "keep goes on from older states"),
    ),
}
"""Facts of a column, all of which must hold."""


def main() -> None:
    pages.fill(PAGE, tables(cases()))


def cases() -> Cases:
    """Return one case for each family."""
    found: Cases = json.loads(RESULT.read_text())["cases"]
    return found


def tables(cases: Cases) -> dict[str, str]:
    """Return the table of each kind by its mark on the page; columns of which nothing is known are left out."""
    return {kind: _table([case for case in cases if case["kind"] == kind]) for kind in TITLES}


def _table(cases: Cases) -> str:
    if not cases:
        return "No row yet."
    columns = {
        title: facts
        for title, facts in COLUMNS.items()
        if any(fact in case["facts"] for case in cases for fact in facts)
    }
    return pages.table(["family", "class", *columns], [_row(case, columns) for case in cases])


def _row(case: dict[str, Any], columns: dict[str, tuple[str, ...]]) -> list[str]:
    named = [case["known_as"], f"`{case['architecture']}`" if case["architecture"] else ""]
    if case["skipped"]:
        return [*named, f"not run: {case['skipped']}", *[""] * (len(columns) - 1)]
    if case["error"]:
        return [*named, f"refused: {case['refused'] or case['error']}", *[""] * (len(columns) - 1)]
    return [*named, *(_cell(case["facts"], facts) for facts in columns.values())]


def _cell(facts: dict[str, bool], names: tuple[str, ...]) -> str:
    known = [facts[name] for name in names if name in facts]
    if not known:
        return "–"
    return "yes" if all(known) else "no"


if __name__ == "__main__":
    main()
