# SPDX-License-Identifier: Apache-2.0
"""Is an updated server the same as one that was started on the new weights? On real shapes, with a real server.

    python benchmarks/update_correct.py --shape Qwen3-8B --out benchmarks/results/update_correct_h200.json

Starts a server on checkpoint A, updates it to B from files, to A again over HTTP while it streams, rolls back to B, updates
it in the other ways that there are (FP8 on the wire; with --device cuda, CUDA IPC), and compares digests and greedy outputs
with a cold start on B. Exit code 1 when anything differs.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from vllm_fp8ext.bench.generated import SHAPES, two_checkpoints
from vllm_fp8ext.bench.provenance import provenance, write_cases
from vllm_fp8ext.demo.server import MODEL, Server, serve_options
from vllm_fp8ext.serve.client import Transport
from vllm_fp8ext.update.contract.manifest import Manifest
from vllm_fp8ext.update.transports.wire import stored
from vllm_fp8ext.update.worker.digest import checkpoint_digests

_PROMPTS = [[7 + 13 * (i + j) % 500 for i in range(48)] for j in range(4)]
_NEW_TOKENS = 48


def main() -> int:
    options = _options()
    console = Console()
    cases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="fp8ext-", dir=options.dir) as scratch:
        folder = Path(scratch)
        a, b = two_checkpoints(None, options.shape, folder, options.device)
        updated = _updated(options, a, b, folder, cases, console)
        _cold(options, b, folder, updated, cases, console)
    table = Table("case", "seconds", "equal")
    for case in cases:
        table.add_row(case["case"], f"{case['seconds']:.3f}", str(case.get("equal", "")))
    console.print(table)
    write_cases(options.out, provenance(), cases)
    return 0 if all(case.get("equal", True) for case in cases) else 1


def _updated(
    options: Any, a: Path, b: Path, folder: Path, cases: list[dict[str, Any]], console: Console
) -> dict[str, Any]:
    """Update a server back and forth; returns what it served of B."""

    def case(name: str, seconds: float, **more: Any) -> None:
        cases.append({"model": options.shape, "case": name, "seconds": seconds, **more})
        console.print(f"{name}: {seconds:.2f} s {more}")

    with _server(options, a, folder / "updated.log", str(folder)) as server, server.client() as client:
        case("start on A", _timed(server.wait, 900))
        weights = client.weights()
        case("twin", 0.0, twin_bytes=weights.twin_bytes, twin_kv_blocks=weights.twin_kv_blocks)
        digests_a, outputs_a = client.digests(), _outputs(server.url)
        start = time.perf_counter()
        update = client.load(b, version="B")
        case("update to B from files", time.perf_counter() - start, **_summary(update))
        start = time.perf_counter()
        digests_b, outputs_b = client.digests(), _outputs(server.url)
        case(
            "digests and outputs of B",
            time.perf_counter() - start,
            differ_from_a=digests_b.digests != digests_a.digests,
        )
        case("addresses after the update", 0.0, equal=digests_b.addresses == digests_a.addresses)
        with _Streaming(server.url) as streaming:
            start = time.perf_counter()
            update = client.push(a, version="A")
            seconds = time.perf_counter() - start
        case("update to A over HTTP while streaming", seconds, **_summary(update), **streaming.result())
        again = client.digests()
        case("digests of A after two updates = cold start's", 0.0, equal=again.digests == digests_a.digests)
        case("outputs of A after two updates = cold start's", 0.0, equal=_outputs(server.url) == outputs_a)
        rolled = client.rollback()
        same = client.digests()
        case("rollback to B", rolled.seconds["pause"], pause_seconds=rolled.seconds["pause"])
        case("digests of B after the rollback", 0.0, equal=same.digests == digests_b.digests)
        digests = {"A": digests_a.digests, "B": digests_b.digests}
        for version, checkpoint, transport, fp8 in _pushes(options.device, a, b):
            weights: Any = dict(stored(checkpoint)) if transport == "ipc" else checkpoint
            with _Streaming(server.url) as streaming:
                start = time.perf_counter()
                update = client.push(weights, version=version, transport=transport, fp8=fp8)
                seconds = time.perf_counter() - start
            name = f"update to {version} over {transport}{' as FP8' if fp8 else ''} while streaming"
            case(name, seconds, **_summary(update), **streaming.result())
            equal = client.digests().digests == digests[version]
            case(f"digests of {version} = those before", 0.0, equal=equal)
            del weights
        end = client.digests().addresses
        case("addresses after everything", 0.0, equal=end == digests_a.addresses)
    return {"digests": digests_b.digests, "outputs": outputs_b}


def _pushes(device: str, a: Path, b: Path) -> list[tuple[str, Path, Transport, bool]]:
    """Version, weights, transport and whether as FP8: the other ways to send weights to a server that serves B."""
    if device != "cuda":
        return [("A", a, "http", True)]
    return [("A", a, "ipc", False), ("B", b, "ipc", False), ("A", a, "ipc", True), ("B", b, "http", True)]


def _cold(
    options: Any,
    b: Path,
    folder: Path,
    updated: dict[str, Any],
    cases: list[dict[str, Any]],
    console: Console,
) -> None:
    with _server(options, b, folder / "cold.log", str(folder)) as server, server.client() as client:
        seconds = _timed(server.wait, 900)
        console.print(f"cold start on B: {seconds:.0f} s")
        equal = client.digests().digests == updated["digests"]
        cases.append(
            {
                "model": options.shape,
                "case": "digests of B = cold start's",
                "seconds": seconds,
                "equal": equal,
            }
        )
        start = time.perf_counter()
        alone = checkpoint_digests(b, Manifest.from_dict(client.manifest()))
        cases.append(
            {
                "model": options.shape,
                "case": "digests of B computed from the checkpoint on the CPU, without vLLM",
                "seconds": time.perf_counter() - start,
                "equal": alone == updated["digests"],
                "tensors": len(alone),
            }
        )
        outputs = _outputs(server.url)
        cases.append(
            {
                "model": options.shape,
                "case": "greedy outputs of B = cold start's",
                "seconds": 0.0,
                "equal": outputs == updated["outputs"],
                "tokens": sum(map(len, outputs)),
            }
        )


def _server(options: Any, model: Path, log: Path, allowed: str) -> Server:
    arguments = [
        *("--skip-tokenizer-init", "--max-model-len", "1024", "--max-num-seqs", "16"),
        *("--tensor-parallel-size", str(options.tp), *options.serve),
    ]
    return Server(
        model, log, arguments=arguments, settings={"allowed_dirs": [allowed], **json.loads(options.settings)}
    )


def _outputs(url: str) -> list[list[int]]:
    """Greedy token ids, one request at a time."""
    return [_complete(url, prompt) for prompt in _PROMPTS]


def _complete(url: str, prompt: list[int]) -> list[int]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": _NEW_TOKENS, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=600).raise_for_status().json()
    tokens: list[int] = reply["choices"][0]["token_ids"]
    return tokens


class _Streaming:
    """A request after the other in the background: how long between tokens, and which weights sampled them."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self._arrivals: list[list[float]] = []
        self._spans: list[list[str]] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "_Streaming":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def result(self) -> dict[str, Any]:
        gaps = [b - a for times in self._arrivals for a, b in pairwise(times)]
        mixed = [spans for spans in self._spans if len(spans) > 1]
        return {
            "stall_seconds": max(gaps, default=None),
            "straddling": mixed[:1],
            "streamed": sum(map(len, self._arrivals)),
        }

    def _run(self) -> None:
        body = {"model": MODEL, "prompt": _PROMPTS[0], "max_tokens": 900, "temperature": 0, "stream": True}
        body["ignore_eos"] = True
        body["return_token_ids"] = True
        while not self._stop.is_set():
            self._arrivals.append([])
            with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=600) as reply:
                for line in reply.iter_lines():
                    if line.startswith("data: {"):
                        self._arrivals[-1].append(time.perf_counter())
                        for choice in json.loads(line[6:])["choices"]:
                            if "weight_versions" in choice:
                                self._spans.append([span["version"] for span in choice["weight_versions"]])


def _summary(update: Any) -> dict[str, Any]:
    return {
        "bytes": update.bytes,
        "phases": update.seconds,
        "pause_seconds": update.seconds["pause"],
        "quantization_error": update.quantization_error.relative if update.quantization_error else None,
    }


def _timed(work: Any, *arguments: Any) -> float:
    start = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - start


def _options() -> Any:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size")
    parser.add_argument("--device", default="cpu", help="where weights are generated")
    parser.add_argument("--dir", type=Path, help="folder with room for two checkpoints")
    parser.add_argument("--settings", default="{}", help="more fp8ext settings, as JSON")
    parser.add_argument(
        "--serve", nargs="*", default=[], help="more options of vllm serve, as words without dashes: a=b"
    )
    parser.add_argument("--out", type=Path, help="JSON results")
    options = parser.parse_args()
    options.serve = serve_options(options.serve)
    return options


if __name__ == "__main__":
    sys.exit(main())
