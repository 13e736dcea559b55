# SPDX-License-Identifier: Apache-2.0
"""Rollout traffic with updates, on BF16, stock `fp8_per_block` and `blockfp8` servers, one after the other on one GPU.

    python benchmarks/load_compare.py --shape Qwen3-8B --device cuda --out benchmarks/results/load_h200.json

Each server runs the load test's rollout profile with the same seed; the weights change after every step, stock's by its own
reload. Reports of all runs are written beside the results.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_fp8ext.bench.generated import SHAPES, allowed_dirs, two_checkpoints
from vllm_fp8ext.bench.provenance import provenance, write_cases
from vllm_fp8ext.demo.server import Server, serve_options
from vllm_fp8ext.environment import ADMIN_KEY

VARIANTS: dict[str, tuple[list[str], bool]] = {
    "bf16": ([], True),
    "fp8_per_block": (["--quantization", "fp8_per_block"], True),
    "blockfp8": ([], False),
}
"""vLLM's options, and whether the server is stock."""


def main() -> int:
    options = _options()
    console, origin = Console(width=140), provenance()
    cases, reports = [], []
    with tempfile.TemporaryDirectory(prefix="fp8ext-", dir=options.dir) as scratch:
        folder = Path(scratch)
        checkpoints = two_checkpoints(options.checkpoints, options.shape, folder, options.device)
        for name in options.variants:
            extra, stock = VARIANTS[name]
            arguments = [
                *(
                    "--skip-tokenizer-init",
                    "--max-model-len",
                    "8192",
                    "--max-num-seqs",
                    str(options.prompts * 16),
                ),
                *("--max-num-batched-tokens", "8192", *extra),
                *serve_options(options.serve),
            ]
            settings = {"allowed_dirs": allowed_dirs(checkpoints)}
            log = folder / f"{name}.log"
            with Server(checkpoints[0], log, arguments=arguments, settings=settings, stock=stock) as server:
                server.wait(1200)
                for traffic in options.traffic:
                    report = folder / f"{name}-{traffic}"
                    reports.append(_load(options, server, checkpoints, name, traffic, report))
                    cases.append(_case(name, traffic, reports[-1]))
                    _show(cases, console)
                    _write(options, origin, cases, reports)
    return 0


def _write(
    options: Any, origin: dict[str, Any], cases: list[dict[str, Any]], reports: list[dict[str, Any]]
) -> None:
    write_cases(options.out, origin, cases)
    if options.page:
        from vllm_fp8ext.loadtest.html_report import page

        options.page.write_text(page(reports))


def _load(
    options: Any, server: Server, checkpoints: list[Path], name: str, traffic: str, report: Path
) -> dict[str, Any]:
    updates = [
        *("--update-every", "step", "--checkpoints", *map(str, reversed(checkpoints))),
        *(("--files",) if name == "blockfp8" else ("--update-through", "stock")),
    ]
    line = [
        *(sys.executable, "-P", "-m", "vllm_fp8ext.cli", "bench", "load", "--url", server.url),
        *("--profile", "rollout", "--time", "600s", "--rollout-steps", str(options.steps)),
        *("--prompts", str(options.prompts), "--samples", str(options.samples)),
        *("--input-tokens", options.input_tokens, "--output-tokens", options.output_tokens),
        *("--vocabulary", "500", "--report", str(report), "--label", f"{name}, {traffic}"),
        *(("--processes", str(options.processes)) if options.processes > 1 else ()),
        *(updates if traffic in ("updates", "one-step-off") else ()),
        *(("--one-step-off",) if traffic == "one-step-off" else ()),
    ]
    subprocess.run(line, env={**os.environ, ADMIN_KEY: server.key}, check=False)
    file = report / "report.json"
    if not file.exists():
        raise SystemExit(f"{name}, {traffic}: the load test made no report; what it said is above")
    result: dict[str, Any] = json.loads(file.read_text())
    return result


def _case(variant: str, traffic: str, report: dict[str, Any]) -> dict[str, Any]:
    measured = report["measured"]
    stalls = [
        update["stall_seconds"] for update in measured["updates"] if update["stall_seconds"] is not None
    ]
    pushes = [update["push_seconds"] for update in measured["updates"]]
    return {
        "variant": variant,
        "profile": f"rollout, {traffic}",
        "tokens_per_s": measured["tokens_per_s"],
        "ttft_p99": measured["ttft"]["p99"],
        "itl_p50": measured["itl"]["p50"],
        "itl_p99": measured["itl"]["p99"],
        "stall_seconds": max(stalls, default=None),
        "step_seconds": measured["steps"],
        "update_seconds": pushes,
        "failed_requests": measured["failed_requests"],
        "invalid": measured["invalid"],
        "updates": measured["updates"],
        "options": report["options"],
    }


def _show(cases: list[dict[str, Any]], console: Console) -> None:
    table = Table("variant", "profile", "tok/s", "TTFT p99", "ITL p50", "ITL p99", "stall", "step p50")
    for case in cases:
        numbers = (case[key] for key in ("tokens_per_s", "ttft_p99", "itl_p50", "itl_p99", "stall_seconds"))
        texts = ["" if number is None else f"{number:.4g}" for number in numbers]
        table.add_row(case["variant"], case["profile"], *texts, f"{case['step_seconds']['p50']:.4g}")
    console.print(table)


def _options() -> Any:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--checkpoints", type=Path, nargs=2, help="serve these instead of generated weights")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument(
        "--traffic", nargs="+", choices=("plain", "updates", "one-step-off"), default=["updates"]
    )
    parser.add_argument("--device", default="cpu", help="where weights are generated")
    parser.add_argument("--dir", type=Path, help="folder with room for two checkpoints")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--processes", type=int, default=1, help="of the load test")
    parser.add_argument("--input-tokens", default="lognormal:500,0.6,2000")
    parser.add_argument("--output-tokens", default="lognormal:600,0.8,4000")
    parser.add_argument("--serve", nargs="*", default=[], help="more options of vllm serve: a=b")
    parser.add_argument("--out", type=Path, help="JSON results")
    parser.add_argument("--page", type=Path, help="one HTML page of all runs")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
