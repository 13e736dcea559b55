# SPDX-License-Identifier: Apache-2.0
"""Whether `fp8ext bench load` and `vllm bench serve` measure the same on the same server, in turn.

    python benchmarks/agreement.py --out benchmarks/results/agreement_cpu.json

Serves the tiny model of this package. Closed loops with the same concurrency and lengths; throughput should agree within 3 %,
medians of TTFT and inter-token latency within 5 %. The server has the first half of the cores to itself, the clients the
other: else the one that computes more between two tokens slows the server down more.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from vllm_fp8ext.bench.provenance import provenance, write_cases
from vllm_fp8ext.checkpoints import LATE
from vllm_fp8ext.demo.server import MODEL, SMALL, Server

USERS, INPUT, OUTPUT = 4, 64, 128
LIMITS = {"tokens_per_s": 0.03, "ttft_p50": 0.05, "itl_p50": 0.05}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--requests", type=int, default=160, help="of each run")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    samples: dict[str, list[dict[str, float]]] = {"fp8ext": [], "vllm": []}
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.sched_setaffinity(0, cores[: -(-len(cores) // 2)])  # the server inherits it
        with Server(LATE, folder / "server.log", arguments=SMALL) as server:
            server.wait()
            os.sched_setaffinity(0, cores[len(cores) // 2 :])
            _vllm(server, folder, options.requests // 4, 0)
            for repeat in range(1, options.repeats + 1):
                samples["vllm"].append(_vllm(server, folder, options.requests, repeat))
                seconds = options.requests * OUTPUT / samples["vllm"][-1]["tokens_per_s"]
                samples["fp8ext"].append(_ours(server, folder, seconds, repeat))
                print(repeat, {who: runs[-1] for who, runs in samples.items()}, flush=True)
    cases, good = [], True
    for metric, limit in LIMITS.items():
        ours, theirs = (
            statistics.median(sample[metric] for sample in samples[who]) for who in ("fp8ext", "vllm")
        )
        within = abs(ours / theirs - 1) <= limit
        good &= within
        print(
            f"{metric}: {ours:.6g} against {theirs:.6g}, {ours / theirs - 1:+.2%}{'' if within else ' TOO FAR'}"
        )
        cases.append({"metric": metric, "fp8ext": ours, "vllm": theirs, "limit": limit, "within": within})
    write_cases(options.out, provenance(), cases, samples=samples)
    return 0 if good else 1


def _vllm(server: Server, folder: Path, requests: int, seed: int) -> dict[str, float]:
    line = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai"]
    line += [
        "--base-url",
        server.url,
        "--endpoint",
        "/v1/completions",
        "--model",
        MODEL,
        "--tokenizer",
        str(LATE),
    ]
    line += ["--dataset-name", "random", "--random-input-len", str(INPUT), "--random-output-len", str(OUTPUT)]
    line += [
        "--num-prompts",
        str(requests),
        "--max-concurrency",
        str(USERS),
        "--ignore-eos",
        "--seed",
        str(seed),
    ]
    line += ["--save-result", "--result-dir", str(folder), "--result-filename", "vllm.json", "--disable-tqdm"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
    result: dict[str, Any] = json.loads((folder / "vllm.json").read_text())
    return {
        "tokens_per_s": result["output_throughput"],
        "ttft_p50": result["median_ttft_ms"] / 1e3,
        "itl_p50": result["median_itl_ms"] / 1e3,
    }


def _ours(server: Server, folder: Path, seconds: float, seed: int) -> dict[str, float]:
    line = [
        sys.executable,
        "-m",
        "vllm_fp8ext.cli",
        "bench",
        "load",
        "--url",
        server.url,
        "--users",
        str(USERS),
    ]
    line += [
        "--time",
        f"{max(1, round(seconds))}s",
        "--input-tokens",
        str(INPUT),
        "--output-tokens",
        str(OUTPUT),
    ]
    line += ["--vocabulary", "100", "--seed", str(seed), "--temperature", "0", "--report", str(folder)]
    line += ["--scrape-every", "60"]
    subprocess.run(line, capture_output=True, check=False)
    measured = json.loads((folder / "report.json").read_text())["measured"]
    return {
        "tokens_per_s": measured["tokens_per_s"],
        "ttft_p50": measured["ttft"]["p50"],
        "itl_p50": measured["itl"]["p50"],
    }


if __name__ == "__main__":
    sys.exit(main())
