# SPDX-License-Identifier: Apache-2.0
"""The table of `docs/scale.md` from what servers of several GPUs were measured to do.

python benchmarks/scale_page.py
"""

import json
from pathlib import Path
from typing import Any

from vllm_fp8ext.bench import pages

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "scale.md"
RESULT = ROOT / "benchmarks" / "results" / "served_h200.json"
LAYOUTS = {"dp2": "`--data-parallel-size 2`", "replicas2": "two servers", "tp2": "`--tensor-parallel-size 2`"}
"""Names on the page, in its order."""
Cases = list[dict[str, Any]]


def main() -> None:
    pages.fill(PAGE, {"several_gpus": table(cases())})


def cases() -> Cases:
    """Return the cases of servers of several GPUs."""
    found: Cases = json.loads(RESULT.read_text())["cases"]
    return [case for case in found if "layout" in case]


def table(cases: Cases) -> str:
    """Return tokens a second of BF16 and blockfp8, by model, requests and layout."""
    rates = {
        (case["model"], case["requests"], case["layout"], case["variant"]): case["tokens_per_s"]
        for case in cases
    }
    keys = sorted({key[:3] for key in rates}, key=lambda key: (key[0], -key[1], list(LAYOUTS).index(key[2])))
    rows = []
    for model, requests, layout in keys:
        bf16, ours = (rates[model, requests, layout, variant] for variant in ("bf16", "blockfp8"))
        numbers = (f"{bf16:,.0f}", f"{ours:,.0f}", f"{ours / bf16:.2f} ×")
        rows.append([model, str(requests), LAYOUTS[layout], *numbers])
    return pages.table(["shape", "requests", "two GPUs as", "BF16", "`blockfp8`", "of BF16"], rows)


if __name__ == "__main__":
    main()
