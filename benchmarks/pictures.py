# SPDX-License-Identifier: Apache-2.0
"""Pictures of updates, of servers, of a training's steps and of runs of reinforcement learning, from the results.

    python benchmarks/pictures.py

Writes `update-phases.svg`, `served.svg`, `load-steps.svg`, `rl-run.svg` and `rl-on-grid.svg` to `docs/images`.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot
from matplotlib.axes import Axes

from vllm_fp8ext.bench.pages import BLUE, FAINT, INK, ORANGE, STYLE, save_picture

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PHASES = ("staging", "prepare", "pause", "verify")
BETWEEN = "waiting"
PHASE_NAMES = {
    "staging": "staging: quantize into the shadow",
    "prepare": "prepare: fingerprint, canary",
    "pause": "pause: drain, swap",
    "verify": "verify: fingerprint again",
    BETWEEN: "between the phases, added up",
}
SERVED = ("fp8_per_block", "blockfp8")
LINES = {
    "bf16": ("BF16", INK, "-"),
    "fp8": ("FP8", ORANGE, "-"),
    "fp8_tis": ("FP8 + TIS", ORANGE, "--"),
    "fp8_end_to_end": ("end to end", BLUE, "-"),
    "fp8_end_to_end_tis": ("end to end + TIS", BLUE, "--"),
    "fp8_kv_tis": ("KV cache too, + TIS", FAINT, "--"),
    "fp8_kv_end_to_end_tis": ("KV cache too, end to end + TIS", FAINT, "-"),
}
"""Name, colour and dashes of each variant of `fp8ext demo rl`."""
SMOOTHED = 10
"""Steps whose mean a point of a run shows."""
KL_BOUND = 0.003
"""Mismatch that runs are to stay below."""
Case = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the pictures of docs/images from the results.")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images", help="folder for the pictures")
    folder = parser.parse_args().out
    with matplotlib.rc_context(STYLE):
        phases_picture(cases("update"), folder / "update-phases.svg")
        served_picture(cases("served"), folder / "served.svg")
        steps_picture(cases("load"), folder / "load-steps.svg")
        runs_picture(runs(on_grid=False), folder / "rl-run.svg", kl_bound=KL_BOUND)
        runs_picture(runs(on_grid=True), folder / "rl-on-grid.svg")


def cases(name: str) -> list[Case]:
    """Return the cases of a result on an H200."""
    result: list[Case] = json.loads((RESULTS / f"{name}_h200.json").read_text())["cases"]
    return result


def phases(update: list[Case], load: int) -> dict[str, float]:
    """Return milliseconds of each phase of an update by CUDA IPC of Qwen3-8B's shape beside so many requests: medians.

    Of the last case whose commits were verified.
    """
    samples = [
        case["samples"]
        for case in update
        if (case["model"], case["transport"], case["load"]) == ("Qwen3-8B", "ipc", load)
        and case["variant"] == "blockfp8"
        and BETWEEN in case["samples"][-1]
    ][-1]
    return {
        name: 1e3 * statistics.median(sample[name] for sample in samples)
        for name in (*PHASES, BETWEEN, "total")
    }


def phases_picture(update: list[Case], file: Path) -> None:
    """Draw when each phase of an update begins and ends, idle and beside 128 requests."""
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 2.9), sharey=True)
    for axis, load in zip(axes, (0, 128), strict=True):
        spans, start = phases(update, load), 0.0
        for row, name in enumerate((*PHASES, BETWEEN)):
            width = spans[name]
            color = {"pause": ORANGE, BETWEEN: FAINT}.get(name, BLUE)
            axis.barh(row, width, left=start, height=0.62, color=color)
            _beside(axis, start + width, row, f"{width:.1f} ms")
            start += width
        axis.set_title(f"{'beside 128 requests' if load else 'idle'}: {spans['total']:.0f} ms", loc="left")
        axis.set_xlabel("milliseconds since the update was opened")
        axis.set_xlim(0, start * 1.22)
    for label, color in (("requests go on", BLUE), ("the engine pauses", ORANGE)):
        axes[0].barh(0, 0, color=color, label=label)
    axes[0].legend(frameon=False, loc="upper right")
    axes[0].set_yticks(range(len(PHASE_NAMES)), list(PHASE_NAMES.values()))
    axes[0].invert_yaxis()
    figure.tight_layout()
    save_picture(figure, file)


def is_shown(case: Case) -> bool:
    """Tell whether each sample is a request of its own, on the most used route, answered at once by one GPU."""
    usual = case["route"] == "completions" and case["logprobs"] in (None, 0) and "layout" not in case
    return usual and not case["streamed"] and not case["one_request"]


def served_picture(served: list[Case], file: Path) -> None:
    """Draw output tokens per second over HTTP as multiples of BF16's, by requests and by what they ask for."""
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 3.2), sharey=True)
    for axis, logprobs in zip(axes, (None, 0), strict=True):
        usual = [case for case in served if is_shown(case) and case["logprobs"] == logprobs]
        counts = sorted({case["requests"] for case in usual})
        for offset, variant in enumerate(SERVED):
            chosen = [case for case in usual if case["variant"] == variant]
            ratios = {case["requests"]: case["ratio_bf16"] for case in chosen}
            places = [at + 0.38 * offset - 0.19 for at in range(len(counts))]
            bars = axis.bar(
                places,
                [ratios[count] for count in counts],
                width=0.34,
                color=(FAINT, BLUE)[offset],
                label=("vLLM's fp8_per_block", "blockfp8")[offset],
            )
            axis.bar_label(bars, fmt="%.2f×", padding=2)
        axis.axhline(1, color=INK, linewidth=1)
        names = [f"{count} requests\nBF16: {_rate(usual, count):,.0f}/s" for count in counts]
        axis.set_xticks(range(len(counts)), names)
        axis.set_title(
            "without logprobs" if logprobs is None else "with the logprob of each token", loc="left"
        )
        axis.tick_params(axis="x", length=0)
    axes[0].set_ylabel("output tokens/s,\nas multiples of BF16's")
    axes[0].set_ylim(0, 2.6)
    axes[0].legend(frameon=False, loc="upper left", ncols=2)
    figure.tight_layout()
    save_picture(figure, file)


def _rate(served: list[Case], requests: int) -> float:
    """Return BF16's output tokens per second with so many requests."""
    [rate] = [
        case["tokens_per_s"] for case in served if (case["variant"], case["requests"]) == ("bf16", requests)
    ]
    return float(rate)


def steps_picture(load: list[Case], file: Path) -> None:
    """Draw the medians of a step's answers and of the update after it, in seconds, by what is served."""
    names = {
        "bf16": "BF16, stock reload",
        "fp8_per_block": "fp8_per_block, stock reload",
        "blockfp8": "blockfp8",
    }
    of_variant = {case["variant"]: case for case in load}
    figure, axis = pyplot.subplots(figsize=(8.5, 2.4))
    for row, variant in enumerate(names):
        case = of_variant[variant]
        answers, update = case["step_seconds"]["p50"], statistics.median(case["update_seconds"])
        first = {"label": "answers of a step"} if row == 0 else {}
        then = {"label": "new weights"} if row == 0 else {}
        axis.barh(row, answers, height=0.62, color=BLUE, **first)
        axis.barh(row, update, left=answers, height=0.62, color=ORANGE, **then)
        _beside(axis, answers + update, row, f"{answers:.1f} + {update:.1f} s")
    axis.set_yticks(range(len(names)), list(names.values()))
    axis.invert_yaxis()
    axis.set_xlabel("seconds")
    axis.set_xlim(0, 19)
    _legend_above(axis)
    figure.tight_layout()
    save_picture(figure, file)


def runs(*, on_grid: bool) -> list[Case]:
    """Return the runs of `fp8ext demo rl` that began on the grid of FP8 codes, or those that did not."""
    everything: list[Case] = json.loads((RESULTS / "rl_cpu.json").read_text())["cases"]
    return [case for case in everything if case["plan"]["on_grid"] is on_grid]


def runs_picture(rl: list[Case], file: Path, *, kl_bound: float | None = None) -> None:
    """Draw reward and mismatch over the steps, by variant: medians of the seeds, and a band from the least to the most."""
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2))
    for variant in (name for name in LINES if any(case["variant"] == name for case in rl)):
        name, color, dashes = LINES[variant]
        of = [case for case in rl if case["variant"] == variant]
        for axis, curve in zip(axes, ("reward", "mismatch_kl"), strict=True):
            columns = list(zip(*(_smooth(case[curve]) for case in of), strict=True))
            steps = range(SMOOTHED, SMOOTHED + len(columns))
            axis.fill_between(
                steps, [*map(min, columns)], [*map(max, columns)], color=color, alpha=0.12, linewidth=0
            )
            axis.plot(steps, [*map(statistics.median, columns)], dashes, color=color, label=name)
    if kl_bound is not None:
        axes[1].axhline(kl_bound, color=FAINT, linewidth=1, linestyle=":")
        axes[1].annotate(f"{kl_bound}", (SMOOTHED, kl_bound), xytext=(0, 3), textcoords="offset points")
    for axis, title in zip(
        axes, ("reward: share of right answers", "mismatch KL, nats a token"), strict=True
    ):
        axis.set_title(title, loc="left")
        axis.set_xlabel("step")
    axes[1].set_yscale("log")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, frameon=False, loc="lower center", ncols=4)
    figure.tight_layout(rect=(0, 0.13, 1, 1))
    save_picture(figure, file)


def _smooth(curve: list[float]) -> list[float]:
    """Return means of `SMOOTHED` values in a row."""
    return [statistics.fmean(curve[end - SMOOTHED : end]) for end in range(SMOOTHED, len(curve) + 1)]


def _beside(axis: Axes, x: float, row: int, text: str) -> None:
    """Write a number at the end of a bar."""
    axis.annotate(text, (x, row), xytext=(4, 0), textcoords="offset points", va="center")


def _legend_above(axis: Axes) -> None:
    axis.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0)


if __name__ == "__main__":
    main()
