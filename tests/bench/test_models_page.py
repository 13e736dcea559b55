# SPDX-License-Identifier: Apache-2.0
"""The page of models says what the rows of the zoo were."""

from pathlib import Path
from types import ModuleType


def test_the_page_has_the_rows_of_the_result(models_page: ModuleType) -> None:
    page = Path(models_page.PAGE).read_text()
    for kind, table in models_page.tables(models_page.cases()).items():
        assert f"<!-- {kind} -->\n{table}\n<!-- /{kind} -->" in page, kind


def test_a_row_says_where_it_comes_from_and_how_it_ended(models_page: ModuleType) -> None:
    for case in models_page.cases():
        assert case["kind"] in models_page.TITLES
        assert case["commit"]
        assert case["date"]
        ended = (bool(case["facts"]), bool(case["error"]), bool(case["skipped"]))
        assert ended in ((True, False, False), (False, True, False), (False, False, True)), case["family"]
        assert all(case["facts"].values()), case["family"]
        assert not case["error"] or case["refused"] in case["error"], case["family"]
