# SPDX-License-Identifier: Apache-2.0
"""The page of scale says what was measured with several GPUs."""

from pathlib import Path
from types import ModuleType


def test_the_page_has_the_table_of_the_result(scale_page: ModuleType) -> None:
    table = scale_page.table(scale_page.cases())
    assert f"<!-- several_gpus -->\n{table}\n<!-- /several_gpus -->" in Path(scale_page.PAGE).read_text()


def test_a_row_compares_both_variants_of_a_layout(scale_page: ModuleType) -> None:
    same = {"model": "M", "requests": 8}
    rates = {
        ("bf16", "tp2"): 1000.0,
        ("blockfp8", "tp2"): 1500.0,
        ("bf16", "dp2"): 900.0,
        ("blockfp8", "dp2"): 1800.0,
    }
    cases = [
        {**same, "variant": variant, "layout": layout, "tokens_per_s": rate}
        for (variant, layout), rate in rates.items()
    ]
    rows = scale_page.table(cases).splitlines()[2:]
    assert rows == [
        "| M | 8 | `--data-parallel-size 2` | 900 | 1,800 | 2.00 × |",
        "| M | 8 | `--tensor-parallel-size 2` | 1,000 | 1,500 | 1.50 × |",
    ]
