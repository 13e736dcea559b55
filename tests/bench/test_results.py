# SPDX-License-Identifier: Apache-2.0
"""What was measured is what the documentation promises."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


def test_the_memory_that_updates_took_is_within_its_bound() -> None:
    page = " ".join((ROOT / "docs" / "weight-updates.md").read_text().split())
    found = re.search(r"Staging takes less than (\d+) MiB at a time, and keeps (\d+) MiB once", page)
    assert found is not None
    staging, kept = (int(text) * MIB for text in found.groups())
    cases = [
        case
        for case in json.loads((ROOT / "benchmarks/results/update_h200.json").read_text())["cases"]
        if case["variant"] == "blockfp8"
        and case["transport"] in ("ipc", "http", "files")
        # calibration has a bound of its own
        and not (case.get("settings") or {}).get("kv_scales")
    ]
    assert {case["transport"] for case in cases} == {"ipc", "http", "files"}
    for case in cases:
        bound = staging + (0 if case["transport"] == "ipc" else kept)
        assert case["peak_extra_bytes"] < bound, (case["model"], case["transport"], case["load"])
