# SPDX-License-Identifier: Apache-2.0
"""Pictures and tables of `docs/kv-cache.md` from the results.

    python benchmarks/kv_page.py

Writes `docs/images/kv_accuracy.svg` and `docs/images/kv_long.svg`, and what stands in the page between `<!-- NAME -->` and
`<!-- /NAME -->`.
"""

import functools
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

from vllm_fp8ext.bench.pages import STYLE, fill, save_picture, table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "kv-cache.md"
IMAGES = ROOT / "docs" / "images"
VARIANTS = {
    "bf16": "BF16",
    "fp8_per_block": "`fp8_per_block`",
    "blockfp8": "`blockfp8`",
    "blockfp8_kv": "`blockfp8`, FP8 KV cache",
}
LABELS = {"stale": "kept from before the first update", "1.0": "1.0"}
Cases = list[dict[str, Any]]


def main() -> None:
    matplotlib.rcParams.update(STYLE)
    _picture(_cases("kv_accuracy"))
    _long_picture([case for case in _long_cases() if case["model"] == "Qwen3-8B"])
    fill(PAGE, tables())


def tables() -> dict[str, str]:
    """By name."""
    kernels = _cases("kernels_h200")
    return {
        "accuracy": _accuracy(_cases("kv_accuracy")),
        "long": _long(_long_cases()),
        "attention": _attention(kernels),
        "mixed": _mixed(kernels),
    }


@functools.cache
def _cases(name: str) -> Cases:
    cases: Cases = json.loads((RESULTS / f"{name}.json").read_text())["cases"]
    return cases


def _long_cases() -> Cases:
    """In the order of the table."""
    cases, variants = _cases("kv_h200"), list(VARIANTS)
    models = list(dict.fromkeys(case["model"] for case in cases))
    return sorted(
        (case for case in cases if "ratio_bf16" in case),
        key=lambda case: (
            *(models.index(case["model"]), case["output"], case["requests"]),
            variants.index(case["variant"]),
        ),
    )


def _long(cases: Cases) -> str:
    titles = [
        "model",
        "requests × in/out",
        "served in",
        "room for tokens of K and V",
        "running",
        "preemptions",
    ]
    rows = [
        [
            case["model"],
            f"{case['requests']} × {case['input']}/{case['output']:,}",
            VARIANTS[case["variant"]],
            f"{case['kv_tokens']:,}",
            f"{case['running']:.0f}",
            str(case["preemptions"]),
            f"{case['tokens_per_s']:,.0f}",
            f"{case['ratio_bf16']:.2f}×",
        ]
        for case in cases
    ]
    return table([*titles, "tokens/s", ""], rows)


def _attention(cases: Cases) -> str:
    bf16, fp8 = ("BF16: FlashAttention 3, µs", "our own"), ("FP8: FlashAttention 3", "our own")
    rows = []
    variants = ("bf16", "blockfp8_bf16", "fp8", "blockfp8")
    for (requests, context), by_variant in _by_context(cases, "attention_decode").items():
        row = [by_variant[variant] for variant in variants]
        cells = [f"{row[0]['us']:,.1f}"]
        cells += [f"{case['us']:,.1f} ({row[0]['us'] / case['us']:.2f}×)" for case in row[1:]]
        cells.append(", ".join(f"{case['ratio_copy']:.0%}" for case in row))
        rows.append([f"{requests}, {context:,}", *cells])
    return table(["requests, context", *bf16, *fp8, "of copy bandwidth"], rows)


def _mixed(cases: Cases) -> str:
    rows = []
    for (requests, context), by_variant in _by_context(cases, "attention_mixed").items():
        flash, ours = by_variant["fp8"]["us"], by_variant["blockfp8"]["us"]
        rows.append([f"{requests:,}, {context:,}", f"{flash:,.1f}", f"{ours:,.1f} ({flash / ours:.2f}×)"])
    return table(["requests, context", "FlashAttention 3, µs", "our own beside it"], rows)


def _by_context(cases: Cases, kernel: str) -> dict[tuple[int, int], dict[str, dict[str, Any]]]:
    """Requests and the context of each: what each variant did."""
    by_context: dict[tuple[int, int], dict[str, dict[str, Any]]] = {}
    for case in cases:
        if case["kernel"] == kernel:
            by_context.setdefault((case["m"], case["shape"][0]), {})[case["variant"]] = case
    return by_context


def _long_picture(cases: Cases) -> None:
    loads = sorted({(case["output"], case["requests"]) for case in cases})
    figure, axis = pyplot.subplots(figsize=(8, 3.6))
    for offset, (variant, label) in enumerate(VARIANTS.items()):
        ratios = {
            (case["output"], case["requests"]): case["ratio_bf16"]
            for case in cases
            if case["variant"] == variant
        }
        places = {load: index + 0.2 * offset - 0.3 for index, load in enumerate(loads) if load in ratios}
        bars = axis.bar(
            list(places.values()), [ratios[load] for load in places], 0.18, label=label.replace("`", "")
        )
        axis.bar_label(bars, fmt="%.2f", fontsize=8)
    axis.set_xticks(range(len(loads)), [f"{requests:,} × {output:,} tokens" for output, requests in loads])
    axis.set_ylabel("output tokens/s by BF16's")
    axis.set_ylim(0, 2.6)
    axis.legend(loc="upper left", ncols=4, frameon=False, fontsize=8)
    figure.tight_layout()
    save_picture(figure, IMAGES / "kv_long.svg")


def _series(cases: Cases) -> dict[str, dict[tuple[str, str], Cases]]:
    """By direction, by policy and granularity: one case an update."""
    by_direction: dict[str, dict[tuple[str, str], Cases]] = {}
    for case in cases:
        key = case["policy"], case["granularity"]
        by_direction.setdefault(case["direction"], {}).setdefault(key, []).append(case)
    return by_direction


def _label(policy: str, granularity: str) -> str:
    return LABELS.get(policy, policy) + (", per head" if granularity == "head" else "")


def _accuracy(cases: Cases) -> str:
    titles = ["K and V", "scales", "mean KL: first update", "last", "largest against `calibrate`"]
    rows = []
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
            rows.append(cells)
    return table([*titles, "logprob error, last", "saturated, last", "answers right, last"], rows)


def _picture(cases: Cases) -> None:
    by_direction = _series(cases)
    figure, axes = pyplot.subplots(1, len(by_direction), figsize=(11, 4), sharey=True, squeeze=False)
    colors = {
        policy: f"C{index}" for index, policy in enumerate(dict.fromkeys(case["policy"] for case in cases))
    }
    for axis, (direction, policies) in zip(axes[0], by_direction.items(), strict=True):
        for (policy, granularity), series in policies.items():
            axis.plot(
                [case["factor"] for case in series],
                [case["mean_kl"] for case in series],
                marker="o",
                markersize=3,
                color=colors[policy],
                linestyle="--" if granularity == "head" else "-",
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
    figure.legend(handles, labels, loc="lower center", ncols=-(-len(labels) // 2), frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.13, 1, 1))
    save_picture(figure, IMAGES / "kv_accuracy.svg")


if __name__ == "__main__":
    main()
