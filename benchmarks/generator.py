# SPDX-License-Identifier: Apache-2.0
"""How much the load generator itself can send and read, before it falls behind its timetable.

    python benchmarks/generator.py --processes 1 2 --out benchmarks/results/generator_cpu.json

Against `vllm_fp8ext.loadtest.trivial_server`, at growing rates: the highest rate of requests and
of tokens at which the schedule delay stays below 10 ms (99th percentile).
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from vllm_fp8ext.bench.provenance import provenance, write_cases

PORT = 8450
OUTPUT_TOKENS = 50
INTERVAL = 0.02


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[1])
    parser.add_argument("--rates", type=float, nargs="+", default=[10, 20, 40, 60, 80, 120, 160, 240, 320])
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cases = []
    line = [sys.executable, "-m", "vllm_fp8ext.loadtest.trivial_server", "--port", str(PORT)]
    with subprocess.Popen([*line, "--interval", str(INTERVAL)]) as server:
        time.sleep(2)
        try:
            for processes in options.processes:
                for rate in options.rates:
                    case = _run(processes, rate, options.seconds)
                    cases.append(case)
                    print(
                        f"{processes} processes, {rate:5g} requests/s: {case['tokens_per_s']:8.0f} tokens/s, "
                        f"schedule delay p99 {case['schedule_delay_p99'] * 1e3:7.1f} ms, "
                        f"inter-token p99 {case['itl_p99'] * 1e3:6.1f} ms {'' if case['valid'] else 'INVALID'}",
                        flush=True,
                    )
                    if not case["valid"]:
                        break
        finally:
            server.kill()
    for processes in options.processes:
        good = [case for case in cases if case["processes"] == processes and case["valid"]]
        best = max(good, key=lambda case: case["tokens_per_s"], default=None)
        if best:
            print(f"{processes} processes: {best['rate']:g} requests/s, {best['tokens_per_s']:.0f} tokens/s")
    write_cases(options.out, provenance(), cases)
    return 0


def _run(processes: int, rate: float, seconds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        line = [sys.executable, "-m", "vllm_fp8ext.cli", "bench", "load", "--url", f"http://127.0.0.1:{PORT}"]
        line += ["--profile", "constant", "--rate", str(rate), "--time", f"{seconds}s", "--report", folder]
        line += ["--input-tokens", "100", "--output-tokens", str(OUTPUT_TOKENS), "--users", str(processes)]
        if processes > 1:
            line += ["--processes", str(processes)]
        subprocess.run(line, capture_output=True, check=False)
        measured = json.loads((Path(folder) / "report.json").read_text())["measured"]
    return {
        "processes": processes,
        "rate": rate,
        "requests_per_s": measured["requests_per_s"],
        "tokens_per_s": measured["tokens_per_s"],
        "schedule_delay_p99": measured["schedule_delay"]["p99"],
        "itl_p99": measured["itl"]["p99"],
        "failed_requests": measured["failed_requests"],
        "valid": not measured["invalid"],
    }


if __name__ == "__main__":
    sys.exit(main())
