# SPDX-License-Identifier: Apache-2.0
"""Puts what a benchmark wrote into a file of results.

    python benchmarks/add_run.py benchmarks/results/rollout_h200.json rollout.json [more.json …] [--note TEXT]

Each new file is a run, or several: where they come from goes to the end of `runs`, and a case replaces the last one that
says the same of `IDENTITY`, or comes last. A file that is not there is made. Runs that no case is of any more are dropped,
and `provenance` is that of the newest. A file with cases that this does not tell apart is refused. Where a run had no BF16
beside it, or that was replaced, `--bf16` gives `ratio_bf16` against the BF16 of another run, and the note should say so.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

IDENTITY = (
    *("model", "kernel", "shape", "m", "part", "transport", "requests", "running", "load", "input", "output"),
    *("variant", "kv_cache", "staging", "policy", "settings", "engine", "fused", "buckets"),
    *("route", "logprobs", "streamed", "one_request", "feature", "seed", "plan", "layout"),
)
"""Identity of a case; everything else was measured."""
NOTHING = '{\n  "cases": []\n}'
"""Text of a file of results before its first run."""
SETUP = ("model", "requests", "input", "output", "kv_cache", "layout")
"""What a case and its BF16 have in common."""

Case = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("measured", type=Path, nargs="+")
    parser.add_argument("--note", default="", help="what else should be known of these runs")
    parser.add_argument(
        "--bf16",
        action="store_true",
        help="ratio_bf16 against the BF16 that is in the results, of another run or not",
    )
    options = parser.parse_args()
    text = options.results.read_text() if options.results.exists() else NOTHING
    results = json.loads(text)
    for file in options.measured:
        try:
            add(results, json.loads(file.read_text()), options.note)
        except ValueError as error:
            raise SystemExit(f"{file}: {error}; nothing was added") from None
    if options.bf16:
        compare(results["cases"])
    first = text.splitlines()[1]
    indent = len(first) - len(first.lstrip())
    options.results.write_text(json.dumps(results, indent=indent) + "\n")


def add(results: dict[str, Any], measured: dict[str, Any], note: str = "") -> None:
    """Put one run into the results.

    Raises:
        ValueError: cases of the run that `IDENTITY` does not tell apart.
    """
    if len({_identity(case) for case in measured["cases"]}) < len(measured["cases"]):
        raise ValueError(f"expected cases that differ in {', '.join(IDENTITY)}, found several alike")
    more = {name: value for name, value in measured.items() if name not in ("provenance", "runs", "cases")}
    runs = results.setdefault("runs", [])
    first = len(runs)
    for origin in measured.get("runs") or [measured["provenance"]]:
        run = {**origin, "command": _bare(origin["command"])}
        runs.append({**run, **more, **({"note": note} if note else {})})
    places = {_identity(case): place for place, case in enumerate(results["cases"])}
    for case in measured["cases"]:
        new = {**case, "run": first + case.get("run", 0)}
        place = places.get(_identity(case))
        if place is None:
            results["cases"].append(new)
        else:
            results["cases"][place] = new
    _drop_unused(results)


def _drop_unused(results: dict[str, Any]) -> None:
    runs, cases = results["runs"], results["cases"]
    used = sorted({case["run"] for case in cases})
    places = {run: place for place, run in enumerate(used)}
    results["runs"] = [runs[run] for run in used]
    results["cases"] = [{**case, "run": places[case["run"]]} for case in cases]
    results["provenance"] = results["runs"][-1]


def compare(cases: list[Case]) -> None:
    """Give cases of tokens a second `ratio_bf16` against the BF16 of the same model and requests."""
    usual = {_setup(case): case["tokens_per_s"] for case in cases if case.get("variant") == "bf16"}
    for case in cases:
        if "tokens_per_s" in case and _setup(case) in usual:
            case["ratio_bf16"] = case["tokens_per_s"] / usual[_setup(case)]


def _identity(case: Case) -> str:
    """No settings are as good as none said; how many requests were running was measured."""
    said = (case.get(name) for name in IDENTITY)
    return json.dumps(
        [None if value == {} or isinstance(value, float) else value for value in said], sort_keys=True
    )


def _setup(case: Case) -> tuple[Any, ...]:
    """A variant that has its KV cache in its name is compared with BF16 throughout."""
    named = str(case.get("variant")).endswith("_kv")
    return tuple("auto" if name == "kv_cache" and named else case.get(name) for name in SETUP)


def _bare(command: str) -> str:
    """A command without the folders in which its machine had things."""
    return re.sub(r"(?<![\w.])/(?:[^\s/]+/)*([^\s/]+)", r"\1", command)


if __name__ == "__main__":
    main()
