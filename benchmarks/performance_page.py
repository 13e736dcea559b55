# SPDX-License-Identifier: Apache-2.0
"""Tables and pictures of `docs/performance.md`, and the tables of engines in `README.md` and `docs/against-fp8_per_block.md`,
from the results.

    python benchmarks/performance_page.py

Writes `docs/images/kernels.svg` and `docs/images/rollout.svg`, and what stands in the pages between `<!-- NAME -->` and
`<!-- /NAME -->`.
"""

import functools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

from vllm_fp8ext.bench.pages import BLUE, FAINT, INK, STYLE, fill, save_picture, table
from vllm_fp8ext.config import Settings

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"
IMAGES = DOCS / "images"
TOKENS = (1, 8, 16, 32, 64)
DECODE = {
    "blockfp8": "blockfp8, BF16 activations",
    "blockfp8_codes": "blockfp8, activations quantized by the layer before",
    "deep_gemm": "vLLM's quantization and DeepGEMM",
    "cutlass": "vLLM's quantization and CUTLASS",
    "scaled_mm": "torch._scaled_mm",
    "humming": "Humming, BF16 activations",
    "flashinfer": "FlashInfer",
}
PREFILL = ("blockfp8", "blockfp8_codes", "deep_gemm", "cutlass", "flashinfer")
PROMPTS = 16
"""Tokens out, of cases that ask for little but the first."""
ENGINES = ("fp8_per_block", "blockfp8")
MODELS = ("Qwen3-8B", "Qwen3-1.7B", "Qwen3-32B", "Qwen3-30B-A3B")
CACHES = ("fp8", "auto")
BUSY = ("bf16", "blockfp8")
"""Engines that were profiled."""
SERVERS = {"bf16": "BF16", "fp8_per_block": "vLLM's `fp8_per_block`", "blockfp8": "`blockfp8`"}
SERVED_ROUTES = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "generate": "/inference/v1/generate",
}
Case = dict[str, Any]
Cases = list[Case]


def main() -> None:
    matplotlib.rcParams.update(STYLE)
    _kernels_picture(_cases("kernels"))
    _rollout_picture(_engine_cases())
    for page, page_tables in tables().items():
        fill(page, page_tables)


def tables() -> dict[Path, dict[str, str]]:
    """By page and name."""
    kernels, rollout = _cases("kernels"), _engine_cases()
    served = [case for case in _cases("served") if "layout" not in case]  # those are on the page of scale
    return {
        DOCS / "performance.md": {
            "served": _served_rates(served),
            "served_shares": _served_shares(served),
            "served_gaps": _served_gaps(served),
            "decode": _decode(kernels),
            "prefill": _prefill(kernels),
            "weights": _weights(kernels),
            "fused": _fused(kernels),
            "rollout": _rollout(rollout),
            "prompts": _prompts(_cases("whole_graphs")),
            "steady": _steady(_cases("steady")),
            "graphs": _graphs(_cases("graph_tokens")),
            "busy": _busy(_cases("profile"), rollout),
            "step_reuse": _step_reuse(_cases("steady_steps")),
            "feature_gains": _feature_gains(_cases("features")),
            "lm_head": _lm_head(_cases("lm_head")),
        },
        ROOT / "README.md": {
            "served": _served_rates([case for case in served if _is_usual(case)]),
        },
        DOCS / "against-fp8_per_block.md": {"ratios": _ratios(rollout)},
    }


@functools.cache
def _cases(name: str) -> Cases:
    """Cases of a file of results; none where it was not measured yet."""
    file = RESULTS / f"{name}_h200.json"
    cases: Cases = json.loads(file.read_text())["cases"] if file.exists() else []
    return cases


def _engine_cases() -> Cases:
    return [case for case in _cases("rollout") if case["output"] != PROMPTS]


def _of(cases: Cases, kernel: str, **values: Any) -> Cases:
    return [
        case
        for case in cases
        if case["kernel"] == kernel
        and case["samples"]
        and all(case[key] == value for key, value in values.items())
    ]


def _shape(shape: list[Any]) -> str:
    return "×".join(map(str, shape))


def _shapes(cases: Cases, kernel: str) -> list[list[Any]]:
    return [
        json.loads(text) for text in dict.fromkeys(json.dumps(case["shape"]) for case in _of(cases, kernel))
    ]


def _decode(cases: Cases) -> str:
    rows = []
    for shape in _shapes(cases, "decode_gemm"):
        for variant in ("bf16", *DECODE):
            cells = []
            for m in TOKENS:
                matching = _of(cases, "decode_gemm", shape=shape, m=m, variant=variant)
                cells.append(
                    f"{matching[0]['us']:.1f} ({matching[0]['ratio_bf16']:.2f}×)" if matching else "–"
                )
            if set(cells) == {"–"}:
                continue
            label = DECODE.get(variant, f"`{variant}`")
            rows.append([_shape(shape), label, *cells])
    for variant in ("blockfp8", "blockfp8_codes", "deep_gemm"):
        ratios = [
            case["ratio_bf16"] for m in TOKENS for case in _of(cases, "decode_gemm", m=m, variant=variant)
        ]
        rows.append(["all", DECODE[variant], _together(ratios), *[""] * (len(TOKENS) - 1)])
    return table(["weight", "variant", *(f"M={m}" for m in TOKENS)], rows)


def _prefill(cases: Cases) -> str:
    rows = []
    for shape in _shapes(cases, "prefill_gemm"):
        for m in (4096, 8192):
            base = _of(cases, "prefill_gemm", shape=shape, m=m, variant="bf16")[0]["us"]
            products = [
                _of(cases, "prefill_gemm", shape=shape, m=m, variant=variant)[0] for variant in PREFILL
            ]
            cells = [f"{case['us']:.0f} ({case['ratio_bf16']:.2f}×)" for case in products]
            rows.append([_shape(shape), str(m), f"{base:.0f}", *cells])
    for variant in PREFILL[:2]:
        ratios = [case["ratio_bf16"] for case in _of(cases, "prefill_gemm", variant=variant)]
        rows.append(["all", "", "", f"`{variant}`: {_together(ratios)}", *[""] * (len(PREFILL) - 2)])
    return table(["weight", "M", "BF16 us", *PREFILL], rows)


def _together(ratios: list[float]) -> str:
    return f"geometric mean {statistics.geometric_mean(ratios):.2f}×, worst {min(ratios):.2f}×"


def _weights(cases: Cases) -> str:
    titles = [
        "weight, scales",
        "us",
        "of copy bandwidth",
        "with sums of errors",
        "`torch.compile` of the reference",
    ]
    rows = []
    for case in _of(cases, "quantize_weight", variant="blockfp8"):
        rival = _of(cases, "quantize_weight", shape=case["shape"], variant="compiled")
        other = f"{rival[0]['us']:.0f} us" if rival else "–"
        sums = _of(cases, "quantize_weight", shape=case["shape"], variant="blockfp8_sums")
        sums_cell = f"{sums[0]['us']:.1f}, {sums[0]['ratio_copy']:.0%}" if sums else "–"
        rows.append(
            [_shape(case["shape"]), f"{case['us']:.1f}", f"{case['ratio_copy']:.0%}", sums_cell, other]
        )
    return table(titles, rows)


def _fused(cases: Cases) -> str:
    kernels = (
        "rmsnorm_quantize",
        "silu_mul_quantize",
        "gelu_mul_quantize",
        "gelu_tanh_mul_quantize",
        "quantize_activation",
        "norm_rope",
    )
    counts = (1, 16, 64, 8192)
    rows = []
    for kernel in kernels:
        cells = []
        for m in counts:
            ours = _of(cases, kernel, m=m, variant="blockfp8")[0]
            apart = _of(cases, kernel, m=m, variant="separate")[0]
            cells.append(f"{ours['us']:.1f}, apart {apart['us']:.1f}")
        rows.append([f"`{kernel}`", *cells])
    return table(["kernel", *(f"M={m}" for m in counts)], rows)


def _rollout(cases: Cases) -> str:
    rows = []
    for group in _groups(cases):
        base = group["bf16"]
        cells, steps = [], [f"{base['ms_per_step']:.2f}"]
        for variant in ENGINES:
            case = group.get(variant)
            cells.append(f"{case['tokens_per_s']:,.0f} ({case['ratio_bf16']:.2f}×)" if case else "–")
            steps.append(f"{case['ms_per_step']:.2f}" if case else "–")
        load = f"{base['requests']} × {base['input']}/{base['output']}"
        rows.append(
            [base["model"], _kv(base), load, f"{base['tokens_per_s']:,.0f}", *cells, ", ".join(steps)]
        )
    steps_title = f"ms per step: BF16, {', '.join(ENGINES)}"
    return table(["model", "KV cache", "requests × in/out", "BF16 tok/s", *ENGINES, steps_title], rows)


def _ratios(cases: Cases) -> str:
    """Tokens per second against BF16's."""
    return _engines(
        cases,
        [(model, cache) for model in MODELS for cache in CACHES],
        [f"`{name}`" for name in ENGINES],
        lambda _, *engines: [f"{case['ratio_bf16']:.2f}×" for case in engines],
    )


def _engines(
    cases: Cases, shown: list[tuple[str, str]], titles: list[str], cells_of: Callable[..., list[str]]
) -> str:
    """Make a row for each number of requests with as many tokens in as out.

    `cells_of` makes its cells, given the cases of BF16, `fp8_per_block` and `blockfp8`.
    """
    rows = []
    for setup in shown:
        for group in _groups(cases):
            base = group["bf16"]
            if (base["model"], base["kv_cache"]) == setup and base["input"] == base["output"]:
                cells = cells_of(base, *(group[variant] for variant in ENGINES))
                rows.append([f"{base['model']}, {_kv(base)}", str(base["requests"]), *cells])
    return table(["model, KV cache", "requests", *titles], rows)


def _prompts(cases: Cases) -> str:
    """Milliseconds to the first tokens."""
    return _beside(
        cases,
        ["model", "prompts × tokens", "BF16 ms", "fp8_per_block", "blockfp8, pieces of graphs", "blockfp8"],
        lambda case: [case["model"], f"{case['requests']} × {case['input']:,}"],
        lambda case, _: f"{case['first_token_ms']:.1f}",
    )


def _steady(cases: Cases) -> str:
    """Tokens per second and milliseconds of a step."""
    return _beside(
        cases,
        ["requests × in/out", "BF16", "fp8_per_block", "blockfp8, pieces of graphs", "blockfp8"],
        lambda case: [_load(case)],
        lambda case, ratio: f"{case['tokens_per_s']:,.0f}/s{ratio}, {case['ms_per_step']:.2f} ms",
    )


def _graphs(cases: Cases) -> str:
    """Milliseconds to the first tokens and tokens per second."""
    return _beside(
        cases,
        ["requests × in/out", "BF16", "fp8_per_block", "blockfp8, graphs up to 2,048 tokens", "blockfp8"],
        lambda case: [_load(case)],
        lambda case, ratio: f"{case['first_token_ms']:.0f} ms, {case['tokens_per_s']:,.0f}/s{ratio}",
    )


def _step_reuse(cases: Cases) -> str:
    """Tokens per second, with the slowest and the fastest turn of each engine."""
    return _beside(
        cases,
        ["requests × in/out", "BF16", "fp8_per_block", "blockfp8, steps made anew", "blockfp8"],
        lambda case: [_load(case)],
        lambda case, ratio: (
            f"{case['tokens_per_s']:,.0f}{ratio}: {min(case['samples']):,.0f}–{max(case['samples']):,.0f}"
        ),
    )


def _feature_gains(cases: Cases) -> str:
    """Tokens per second with all features and without one, with the slowest and the fastest turn of each engine."""
    if not cases:
        return ""
    rows = []
    for case in sorted(
        cases, key=lambda case: (case["feature"], *_order({"kv_cache": case.get("kv"), **case}))
    ):
        rates = [
            f"{case[side]:,.0f}: {min(case['samples'][side]):,.0f}–{max(case['samples'][side]):,.0f}"
            for side in ("on", "off")
        ]
        load = _load(case) if "route" not in case else f"{_load(case)}, {_request_words(case)}"
        rows.append([f"`{case['feature']}`", case["model"], load, *rates, f"{case['gain']:+.1%}"])
    return table(["feature", "model", "requests × in/out", "with all", "without it", "gain"], rows)


def _lm_head(cases: Cases) -> str:
    """Tokens per second by the setting of the output layer, and how far its distributions are from the default's."""
    if not cases:
        return ""
    default = Settings().lm_head
    bases = {_order(case): case for case in cases if case["settings"].get("lm_head", default) == default}
    rows = []
    for case in cases:
        base = bases[_order(case)]
        rate = f"{case['tokens_per_s']:,.0f} ({case['tokens_per_s'] / base['tokens_per_s']:.2f}×)"
        head, same = case["settings"].get("lm_head", default), f"{case['same_choice']:.1%}"
        rows.append([case["model"], _load(case), f"`{head}`", rate, f"{case['kl']:.2g}", same])
    return table(["model", "requests × in/out", "`lm_head`", "tokens/s", "KL, nats", "same choice"], rows)


def _beside(
    cases: Cases,
    titles: list[str],
    of: Callable[[Case], list[str]],
    cell_of: Callable[[Case, str], str],
) -> str:
    """Make a table of engines, two of `blockfp8` among them.

    `of` makes a row's first cells; `cell_of` makes the cell of an engine, given its case and its ratio to BF16 as text.
    """
    rows = []
    for engines in _two_of_ours(cases):
        ratios = ["", *(f" ({case['ratio_bf16']:.2f}×)" for case in engines[1:])]
        rows.append([*of(engines[0]), *map(cell_of, engines, ratios)])
    return table(titles, rows)


def _load(case: Case) -> str:
    return f"{case['requests']} × {case['input']:,}/{case['output']:,}"


def _two_of_ours(cases: Cases) -> list[Cases]:
    """By what was asked of them, BF16, `fp8_per_block`, `blockfp8` with settings and without."""
    with_settings = sorted((case for case in cases if case["settings"]), key=_order)
    return [
        [group["bf16"], group["fp8_per_block"], case, group["blockfp8"]]
        for group, case in zip(_groups(cases), with_settings, strict=True)
    ]


def _busy(profile: Cases, rollout: Cases) -> str:
    """What the GPU does in a decode step, from cases that differ in the number of tokens out, beside how long one takes."""
    rows = []
    ends = sorted(_groups(profile), key=lambda group: (group["bf16"]["requests"], group["bf16"]["output"]))
    for short, long in zip(ends[::2], ends[1::2], strict=True):
        case = short["bf16"]
        longer = {**{key: case[key] for key in ("model", "kv_cache", "requests")}, "output": 1024}
        steps = next(group for group in _groups(rollout) if longer.items() <= group["bf16"].items())
        tokens = long["bf16"]["output"] - case["output"]
        cells = []
        for base, ours in (
            [(long[v]["busy_milliseconds"] - short[v]["busy_milliseconds"]) / tokens for v in BUSY],
            [steps[v]["ms_per_step"] for v in BUSY],
        ):
            cells += [f"{base:.2f}", f"{ours:.2f} ({base / ours:.2f}×)"]
        rows.append([str(case["requests"]), *cells])
    return table(["requests", "GPU busy ms: BF16", "blockfp8", "step ms: BF16", "blockfp8"], rows)


def _kv(case: dict[str, Any]) -> str:
    return "FP8" if case["kv_cache"] == "fp8" else "BF16"


def _groups(cases: Cases) -> list[dict[str, dict[str, Any]]]:
    """Cases without settings that differ in the variant alone, by variant: where there are several, the last."""
    groups: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for case in cases:
        if case["settings"]:
            continue
        groups.setdefault(_order(case), {})[case["variant"]] = case
    return [groups[key] for key in sorted(groups) if "bf16" in groups[key]]


def _order(case: dict[str, Any]) -> tuple[Any, ...]:
    """What it is of, in the order of tables: Qwen3-8B first."""
    setup = tuple(case[part] for part in ("model", "kv_cache", "requests", "input", "output"))
    return (setup[0] != "Qwen3-8B", *setup)


def _kernels_picture(cases: Cases) -> None:
    shapes = _shapes(cases, "decode_gemm")
    figure, axes = pyplot.subplots(1, len(shapes), figsize=(12, 3.9), sharey=True)
    for axis, shape in zip(axes, shapes, strict=True):
        for variant, label in DECODE.items():
            points = [
                (case["m"], case["ratio_bf16"])
                for case in _of(cases, "decode_gemm", shape=shape, variant=variant)
                if case["m"] in TOKENS
            ]
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
        axis.axhline(1, color=FAINT, linewidth=0.8)
        axis.set(title=_shape(shape), xscale="log", xlabel="tokens", ylim=(0, 2.5))
        axis.set_xticks(TOKENS, [str(m) for m in TOKENS])
    axes[0].set_ylabel("speed of cuBLAS BF16")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=3, frameon=False)
    figure.tight_layout(rect=(0, 0.2, 1, 1))
    save_picture(figure, IMAGES / "kernels.svg")


def _rollout_picture(cases: Cases) -> None:
    """One panel for each model and KV cache."""
    panels: dict[str, list[dict[str, dict[str, Any]]]] = {}
    for group in _groups(cases):
        base = group["bf16"]
        panels.setdefault(f"{base['model']}, KV {_kv(base)}", []).append(group)
    figure, axes = pyplot.subplots(2, -(-len(panels) // 2), figsize=(12, 5.6), sharey=True)
    for axis, (title, groups) in zip(axes.flat, panels.items(), strict=False):
        for offset, variant in enumerate(ENGINES):
            places = [at + 0.4 * offset - 0.2 for at, group in enumerate(groups) if variant in group]
            ratios = [group[variant]["ratio_bf16"] for group in groups if variant in group]
            bars = axis.bar(places, ratios, width=0.38, color=(FAINT, BLUE)[offset], label=variant)
            axis.bar_label(bars, fmt="%.1f", fontsize=8, padding=1)
        axis.axhline(1, color=INK, linewidth=0.8)
        names = [_asked(group["bf16"]) for group in groups]
        axis.set_xticks(range(len(names)), names, fontsize=8)
        axis.tick_params(axis="x", length=0)
        axis.set_title(title, fontsize=10, loc="left")
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis in axes[:, 0]:
        axis.set_ylabel("multiples of BF16's\noutput tokens/s", fontsize=9)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower right", ncols=2, frameon=False)
    figure.supxlabel("requests at once (tokens in/out, where not 1,024 each)", fontsize=10)
    figure.tight_layout()
    save_picture(figure, IMAGES / "rollout.svg")


def _asked(case: Case) -> str:
    """Name a case: its requests, and its tokens unless they are 1,024 each."""
    usual = (case["input"], case["output"]) == (1024, 1024)
    return str(case["requests"]) if usual else f"{case['requests']}\n{case['input']}/{case['output']}"


def _served_rates(cases: Cases) -> str:
    """Output tokens per second, and how many times as fast as BF16; in bold the fastest of what is asked."""
    rows = []
    for (requests, words), of_variant in _by_request(cases).items():
        best = max(case["tokens_per_s"] for case in of_variant.values())
        cells = []
        for variant in SERVERS:
            case = of_variant.get(variant)
            if case is None:
                cells.append("–")
                continue
            ratio = "" if variant == "bf16" else f" ({case['ratio_bf16']:.2f}×)"
            text = f"{case['tokens_per_s']:,.0f}{ratio}"
            cells.append(f"**{text}**" if case["tokens_per_s"] == best else text)
        rows.append([str(requests), words, *cells])
    return table(["requests", "asked for", *SERVERS.values()], rows)


def _is_usual(case: Case) -> bool:
    """Tell whether each sample is a request of its own on the most used route, without candidates."""
    return case["route"] == "completions" and case["logprobs"] in (None, 0) and not case["one_request"]


def _served_gaps(cases: Cases) -> str:
    """Milliseconds between two parts of a stream, and tokens of a part."""
    rows = []
    for (requests, words), of_variant in _by_request(cases).items():
        for variant, name in SERVERS.items():
            case = of_variant.get(variant)
            if case is not None and case["streamed"]:
                times = [f"{1e3 * case[key]:.1f} ms" for key in ("itl_p50", "itl_p99")]
                rows.append([str(requests), words, name, f"{case['tokens_per_part']:.1f}", *times])
    return table(["requests", "asked for", "server", "tokens a part", "median gap", "99th percentile"], rows)


def _served_shares(cases: Cases) -> str:
    """Show each rate as a part of that without logprobs, not streamed."""
    rows = []
    for (requests, words), of_variant in _by_request(cases).items():
        ratios = [of_variant.get(variant, {}).get("ratio_without_logprobs") for variant in SERVERS]
        if any(ratio not in (None, 1.0) for ratio in ratios):
            shown = ["–" if ratio is None else f"{100 * ratio:.1f} %" for ratio in ratios]
            rows.append([str(requests), words, *shown])
    return table(["requests", "asked for", *SERVERS.values()], rows)


def _by_request(cases: Cases) -> dict[tuple[int, str], dict[str, Case]]:
    cells: dict[tuple[int, str], dict[str, Case]] = {}
    for case in sorted(cases, key=lambda case: int(case["requests"])):
        cells.setdefault((case["requests"], _request_words(case)), {})[case["variant"]] = case
    return cells


def _request_words(case: Case) -> str:
    words = ["no logprobs" if case["logprobs"] is None else f"`logprobs: {case['logprobs']}`"]
    words += ["streamed"] if case["streamed"] else []
    words += [f"`n: {case['samples_per_prompt']}`"] if case["one_request"] else []
    words += [f"`{SERVED_ROUTES[case['route']]}`"] if case["route"] != "completions" else []
    return ", ".join(words)


if __name__ == "__main__":
    main()
