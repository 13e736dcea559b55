# SPDX-License-Identifier: Apache-2.0
"""Tables of measured times: runs are added, and cases keep saying of which they are."""

import json
from pathlib import Path

import pytest

from vllm_fp8ext.bench.measured import Measured


def test_a_later_run_leaves_what_it_does_not_measure(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    first = Measured(file, ("n", "k"))
    first.put({"n": 2, "k": 1, "us": 5.0})
    first.put({"n": 1, "k": 1, "us": 6.0})
    Measured(file, ("n", "k")).put({"n": 2, "k": 1, "us": 4.0})
    table = json.loads(file.read_text())
    assert table["cases"] == [{"n": 1, "k": 1, "us": 6.0, "run": 0}, {"n": 2, "k": 1, "us": 4.0, "run": 1}]
    assert [bool(run["date"]) for run in table["runs"]] == [True, True]


def test_no_time_is_no_number(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    table = Measured(file, ("n",))
    table.put({"n": 1, "us": 5.0})
    with pytest.raises(ValueError, match="float values"):
        table.put({"n": 2, "us": float("nan")})
    table.put({"n": 3, "us": 6.0})
    assert [case["n"] for case in json.loads(file.read_text())["cases"]] == [1, 3]
