# SPDX-License-Identifier: Apache-2.0
"""Picture and table of `docs/kv-cache.md` from `results/kv_accuracy.json`.

    python benchmarks/kv_page.py

Writes `docs/images/kv_accuracy.svg` and what stands in the page between `<!-- accuracy -->` and `<!-- /accuracy -->`.
"""

import json
import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "kv-cache.md"
PICTURE = ROOT / "docs" / "images" / "kv_accuracy.svg"
LABELS = {"stale": "kept from before the first update", "1.0": "1.0"}
Cases = list[dict[str, Any]]


def main() -> None:
    cases: Cases = json.loads((RESULTS / "kv_accuracy.json").read_text())["cases"]
    matplotlib.rcParams["svg.hashsalt"] = "fp8ext"  # the same picture from the same numbers
    _picture(cases)
    page, count = re.subn(
        r"(<!-- accuracy -->\n).*?(<!-- /accuracy -->)",
        rf"\g<1>{_table(cases)}\n\g<2>",
        PAGE.read_text(),
        flags=re.DOTALL,
    )
    assert count == 1
    PAGE.write_text(page)


def _series(cases: Cases) -> dict[str, dict[tuple[str, str], Cases]]:
    """By direction, by policy and granularity: one case an update."""
    found: dict[str, dict[tuple[str, str], Cases]] = {}
    for case in cases:
        key = case["policy"], case["granularity"]
        found.setdefault(case["direction"], {}).setdefault(key, []).append(case)
    return found


def _label(policy: str, granularity: str) -> str:
    return LABELS.get(policy, policy) + (", per head" if granularity == "head" else "")


def _table(cases: Cases) -> str:
    lines = [
        "| K and V | scales | mean KL: first update | last | largest against `calibrate` | logprob error, last | "
        "saturated, last | answers right, last |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for direction, policies in _series(cases).items():
        for (policy, granularity), series in policies.items():
            fresh = policies.get(("calibrate", granularity))
            ratio = (
                max(one["mean_kl"] / other["mean_kl"] for one, other in zip(series, fresh, strict=True))
                if fresh
                else None
            )
            first, last = series[1], series[-1]
            cells = [
                f"{direction.removesuffix('s')} to ×{last['factor']:g}",
                _label(policy, granularity),
                f"{first['mean_kl']:.2g}",
                f"{last['mean_kl']:.2g}",
                "–" if ratio is None else f"{ratio:,.2f}×" if ratio < 100 else f"{ratio:,.0f}×",
                f"{last['logprob_error']:.2g}",
                f"{last['saturated_fraction']:.2%}",
                f"{last['accuracy']:.1%}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _picture(cases: Cases) -> None:
    found = _series(cases)
    figure, axes = pyplot.subplots(1, len(found), figsize=(11, 3.8), sharey=True, squeeze=False)
    for axis, (direction, policies) in zip(axes[0], found.items(), strict=True):
        for (policy, granularity), series in policies.items():
            axis.plot(
                [case["factor"] for case in series],
                [case["mean_kl"] for case in series],
                marker="o",
                markersize=3,
                label=_label(policy, granularity),
            )
        axis.set(
            title=f"K and V {direction.removesuffix('s')}",
            xscale="log",
            yscale="log",
            xlabel="times as large as at first",
        )
        if direction == "shrinks":
            axis.invert_xaxis()
    axes[0][0].set_ylabel("mean KL against a BF16 KV cache, nats")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), frameon=False)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
