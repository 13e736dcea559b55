# SPDX-License-Identifier: Apache-2.0
"""Tables of `docs/trainer-kit.md` with the runs of `fp8ext demo rl`, from the results.

    python benchmarks/rl_page.py

Fills `<!-- rl -->` and `<!-- rl-on-grid -->`. A number is the median of the seeds, with the least and the most of them.
"""

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_fp8ext.bench.pages import fill, table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "rl_cpu.json"
PAGE = ROOT / "docs" / "trainer-kit.md"
TITLES = (
    "variant",
    "reward, first tenth",
    "reward, last quarter",
    "mismatch KL",
    "ESS",
    "entropy",
    "s a run",
)

Case = dict[str, Any]


def main() -> None:
    cases: list[Case] = json.loads(RESULTS.read_text())["cases"]
    tables = {
        name: table(TITLES, rows([case for case in cases if case["plan"]["on_grid"] is on_grid]))
        for name, on_grid in (("rl", False), ("rl-on-grid", True))
    }
    fill(PAGE, tables)


def rows(cases: list[Case]) -> list[tuple[str, ...]]:
    """Return a row for each variant, in the order of the cases. KL, ESS and entropy are means over the last quarter."""
    result = []
    for name in dict.fromkeys(case["variant"] for case in cases):
        of = [case for case in cases if case["variant"] == name]
        result.append(
            (
                f"`{name}`",
                spread(of, lambda case: early(case["reward"]), "{:.0%}"),
                spread(of, lambda case: late(case["reward"]), "{:.0%}"),
                spread(of, lambda case: late(case["mismatch_kl"]), "{:.4f}"),
                spread(of, lambda case: late(case["ess"]), "{:.3f}"),
                spread(of, lambda case: late(case["entropy"]), "{:.2f}"),
                spread(of, lambda case: case["seconds"], "{:.0f}"),
            )
        )
    return result


def early(curve: list[float]) -> float:
    """Return the mean of the first tenth of a curve."""
    return statistics.fmean(curve[: len(curve) // 10])


def late(curve: list[float]) -> float:
    """Return the mean of the last quarter of a curve."""
    return statistics.fmean(curve[-(len(curve) // 4) :])


def spread(cases: list[Case], value: Callable[[Case], float], form: str) -> str:
    """Format the median of the seeds, and their range."""
    values = [value(case) for case in cases]
    middle, least, most = (form.format(of(values)) for of in (statistics.median, min, max))
    return middle if len(values) == 1 else f"{middle} ({least} to {most})"


if __name__ == "__main__":
    main()
