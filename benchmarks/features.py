# SPDX-License-Identifier: Apache-2.0
"""Measure what features that reach into vLLM gain: engines with all, and without one at a time, in turn.

    python benchmarks/features.py --shape Qwen3-8B --cases 8x512x256 128x512x256 --out features.json -- --kv fp8 --kv-gib 7
    python benchmarks/features.py --served --shape Qwen3-8B --cases 128:logprobs=0 --out features.json -- --kv fp8

It runs `fp8ext bench rollout`, or with --served `fp8ext bench http`, whose options follow `--`. An engine without a feature
has `features_off`. What needs a feature is off with it. No engine has a shadow of its weights, so that all start side by
side and fit beside each other. `on` and `off` are tokens per second with all features and without this one. --append keeps
the cases that --out has. Where the run ends early (--seconds after `--`), the cases that are measured are written.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_fp8ext.bench import over_http, rollout
from vllm_fp8ext.bench.generated import SHAPES
from vllm_fp8ext.bench.options import case_of
from vllm_fp8ext.bench.provenance import provenance, write_cases
from vllm_fp8ext.compat.interfaces import CORE, features

IN_ENGINE = (
    "decode_attention",
    "decode_step_reuse",
    "fusion",
    "mixed_full_cudagraph",
    "norm_rope",
    "piecewise_capture_sizes",
    "quantized_attention",
    "sampling_cudagraph",
    "slot_fast_path",
)
IN_SERVER = ("flat_answers", "flat_logprobs", "json_responses", "output_interval")
LEAST_GAIN = 0.02
"""Gain by which a feature earns its place, in some case."""
console = Console(width=120, highlight=False)


def main() -> int:
    options = _options()
    names = options.features or (IN_SERVER if options.served else IN_ENGINE)
    origin = provenance()
    settings = [
        json.dumps({"staging": "none", "features_off": off}) for off in ([], *([name] for name in names))
    ]
    with tempfile.TemporaryDirectory() as folder:
        measured = Path(folder) / "cases.json"
        run = over_http.main if options.served else rollout.main
        shared = ["--shape", options.shape, "--variants", "blockfp8", "--cases", *options.cases]
        if not options.served:
            shared += ["--engine", json.dumps(_beside_others(options.cases))]
        try:
            run([*shared, "--settings", *settings, "--out", str(measured), *options.more])
        finally:
            if measured.exists():
                _write(options, origin, names, json.loads(measured.read_text())["cases"])
    return 0


def _beside_others(cases: list[str]) -> dict[str, Any]:
    """Arguments of engines that start at once on one GPU: none waits for memory that another one takes."""
    return {"gpu_memory_utilization": 0.05, "max_num_seqs": max(case_of(case)[0] for case in cases)}


def _write(
    options: Any, origin: dict[str, Any], names: Sequence[str], measured: list[dict[str, Any]]
) -> None:
    """Write the gain of each feature in each case, and print them."""
    before = json.loads(options.out.read_text()) if options.append and options.out.exists() else None
    cases = [case for name in names for case in _compared(name, measured)]
    runs = [*(before or {}).get("runs", ()), origin]
    kept = [] if before is None else before["cases"]
    added = [{**case, "run": len(runs) - 1} for case in cases]
    write_cases(options.out, (before or {"provenance": origin})["provenance"], [*kept, *added], runs=runs)
    for case in cases:
        mark = "" if case["gain"] >= LEAST_GAIN else "  below 2 %"
        console.print(
            f"{case['feature']:26} {case['case']:40} {case['off']:10,.0f} → {case['on']:10,.0f}  {case['gain']:+.1%}{mark}"
        )


def _compared(feature: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare the engine with all features and the one without this, in each case."""
    asked = (
        "requests",
        "input",
        "output",
        "route",
        "logprobs",
        "streamed",
        "one_request",
        "samples_per_prompt",
        "kv",
        "kv_cache",
    )
    compared = []
    for off in cases:
        if _without(off) != [feature]:
            continue
        same = {key: off[key] for key in asked if key in off}
        [on] = [case for case in cases if not _without(case) and same.items() <= case.items()]
        rates = [statistics.median(case["samples"]) for case in (on, off)]
        compared.append(
            {
                "feature": feature,
                "model": off["model"],
                **same,
                "case": " ".join(
                    f"{key}={value}" for key, value in same.items() if value not in (None, False)
                ),
                "on": rates[0],
                "off": rates[1],
                "gain": rates[0] / rates[1] - 1,
                "samples": {"on": on["samples"], "off": off["samples"]},
            }
        )
    return compared


def _without(case: dict[str, Any]) -> list[str]:
    """Features that an engine lacks; `bench http` tells its settings in the name of a variant."""
    settings = case.get("settings") or json.loads(case["variant"].partition(" ")[2] or "{}")
    return list(settings.get("features_off", ()))


def _options() -> Any:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = sorted(name for name in features() if name != CORE)
    parser.add_argument("--shape", choices=SHAPES, default="Qwen3-8B", help="of the model")
    parser.add_argument("--features", nargs="+", choices=known, help="by default those that act here")
    parser.add_argument("--served", action="store_true", help="over HTTP")
    parser.add_argument("--cases", nargs="+", required=True, help="as the command that is run takes them")
    parser.add_argument("--append", action="store_true", help="keep the other cases that --out has")
    parser.add_argument("--out", type=Path, required=True, help="write the cases here, as JSON")
    parser.add_argument("more", nargs="*", help="options of the command that is run, after --")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
