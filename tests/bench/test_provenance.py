# SPDX-License-Identifier: Apache-2.0
"""The file of a benchmark's cases."""

import json
from pathlib import Path

from vllm_fp8ext.bench.provenance import provenance, write_cases


def test_cases_stand_under_where_they_come_from(tmp_path: Path) -> None:
    file, origin = tmp_path / "new" / "found.json", provenance()
    for cases in ([{"us": 1.0}], [{"us": 1.0}, {"us": 2.0}]):
        write_cases(file, origin, cases, copy_gbps=3.0)
        assert json.loads(file.read_text()) == {"provenance": origin, "copy_gbps": 3.0, "cases": cases}
    write_cases(None, origin, [])
    assert list(tmp_path.iterdir()) == [file.parent]
