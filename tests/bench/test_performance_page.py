# SPDX-License-Identifier: Apache-2.0
"""Pages tell of engines and kernels what the results say."""

from types import ModuleType


def test_the_pages_have_the_numbers_of_the_results(performance_page: ModuleType) -> None:
    tables = performance_page.tables()
    assert {"README.md", "performance.md", "against-fp8_per_block.md"} == {page.name for page in tables}
    for page, page_tables in tables.items():
        text = page.read_text()
        for name, table in page_tables.items():
            assert f"<!-- {name} -->\n{table}\n<!-- /{name} -->" in text, f"{page.name}, {name}"
