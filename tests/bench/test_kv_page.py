# SPDX-License-Identifier: Apache-2.0
"""The page of the KV cache tells what the results say."""

from types import ModuleType


def test_the_page_has_the_numbers_of_the_results(kv_page: ModuleType) -> None:
    text = kv_page.PAGE.read_text()
    for name, table in kv_page.tables().items():
        assert f"<!-- {name} -->\n{table}\n<!-- /{name} -->" in text, name
