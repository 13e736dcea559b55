# SPDX-License-Identifier: Apache-2.0
"""How fast uploads come in, and what they do to streams beside them. On a real server, with curl as the client.

    python benchmarks/upload.py --shape Qwen3-0.6B --out benchmarks/results/upload_h200.json

Rate: a body for our route against the same body for a route of the same server that drops it; the body is a tensor that the
model does not use, so that nothing is quantized. Stream: inter-token latency with and without uploads one after the other.
Variants are interleaved.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import statistics
import struct
import subprocess
import tempfile
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from vllm_fp8ext.bench.generated import SHAPES, write_checkpoint
from vllm_fp8ext.bench.provenance import provenance, write_cases
from vllm_fp8ext.demo.server import MODEL, Server

IGNORED = "upload.k_scale"
"""A server takes scales of a KV cache, of any shape, and does not use them."""


def main() -> None:
    options = _options()
    console = Console()
    with tempfile.TemporaryDirectory(prefix="fp8ext-", dir=options.dir) as scratch:
        folder = Path(scratch)
        write_checkpoint(folder / "model", options.shape, 0, options.device)
        body = folder / "body"
        _write_body(body, options.mebibytes << 20)
        with _server(options, folder) as server:
            server.wait(900)
            with server.client() as client:
                update = client.open().id
            calls = _calls(server, update, body)
            _stream(server, options.tokens)
            cases = _rates(options, calls, body.stat().st_size) + _latencies(options, server, calls)
    table = Table("case", "variant", "median", "ratio")
    for case in cases:
        table.add_row(
            case["case"], case["variant"], f"{case['median']:.4g} {case['unit']}", f"{case['ratio']:.3f}"
        )
    console.print(table)
    write_cases(options.out, provenance(), cases)


def _rates(options: Any, calls: dict[str, list[str]], size: int) -> list[dict[str, Any]]:
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(options.repeats + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            subprocess.run(call, check=True, stdout=subprocess.DEVNULL)
            if repeat:
                samples[name].append(size / (time.perf_counter() - start) / 1e9)
    return _cases("upload rate", "GB/s", samples, "bare handler")


def _latencies(options: Any, server: Server, calls: dict[str, list[str]]) -> list[dict[str, Any]]:
    variants = {
        "no upload": None,
        "beside uploads": calls["chunk"],
        "beside bare uploads": calls["bare handler"],
    }
    samples: dict[str, list[float]] = {name: [] for name in variants}
    tails: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(options.repeats):
        for name, call in variants.items():
            with _repeated(call):
                gaps = _stream(server, options.tokens)
            samples[name].append(statistics.median(gaps) * 1e3)
            tails[name].append(statistics.quantiles(gaps, n=100)[-1] * 1e3)
    return _cases("inter-token latency", "ms", samples, "no upload") + _cases(
        "inter-token latency, p99", "ms", tails, "no upload"
    )


def _cases(case: str, unit: str, samples: dict[str, list[float]], against: str) -> list[dict[str, Any]]:
    medians = {name: statistics.median(values) for name, values in samples.items()}
    return [
        {"case": case, "variant": name, "unit": unit, "median": medians[name], "samples": values}
        | {"ratio": medians[name] / medians[against]}
        for name, values in samples.items()
    ]


def _stream(server: Server, tokens: int) -> list[float]:
    """Seconds between the tokens of one stream."""
    body = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    times = []
    url = f"{server.url}/v1/completions"
    with httpx.stream(
        "POST", url, json=body | {"stream": True, "return_token_ids": True}, timeout=300
    ) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
    return [b - a for a, b in itertools.pairwise(times[8:])]


@contextlib.contextmanager
def _repeated(call: list[str] | None) -> Iterator[None]:
    """Uploads one after the other, as long as the context lives."""
    stop = threading.Event()

    def run() -> None:
        while call and not stop.is_set():
            subprocess.run(call, check=True, stdout=subprocess.DEVNULL)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _calls(server: Server, update: str, body: Path) -> dict[str, list[str]]:
    digest = b64encode(hashlib.sha256(body.read_bytes()).digest()).decode()
    base = ["curl", "-sS", "--fail-with-body", "-T", str(body), "-H", f"Authorization: Bearer {server.key}"]
    ours = [*base, f"{server.url}/fp8ext/v1/updates/{update}/chunks/0"]
    return {
        "bare handler": [*base, f"{server.url}/bare"],
        "chunk": ours,
        "chunk with Content-Digest": [*ours, "-H", f"Content-Digest: sha-256=:{digest}:"],
    }


def _write_body(path: Path, size: int) -> None:
    header = json.dumps({IGNORED: {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        block = os.urandom(1 << 20)
        for _ in range(size >> 20):
            file.write(block)


def _server(options: Any, folder: Path) -> Server:
    metadata = folder / "plugin" / "fp8ext_bare-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: fp8ext-bare\nVersion: 0\n")
    entry = "[vllm.endpoint_plugins]\nfp8ext_bare = bare_upload_plugin:BareUpload\n"
    (metadata / "entry_points.txt").write_text(entry)
    path = [str(metadata.parent), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, path)), "VLLM_PLUGINS": "fp8ext_bare"}
    arguments = ["--max-model-len", "4096", "--max-num-seqs", "8", "--skip-tokenizer-init", *options.vllm]
    return Server(folder / "model", folder / "server.log", arguments=arguments, variables=variables)


def _options() -> Any:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="Qwen3-0.6B")
    parser.add_argument("--mebibytes", type=int, default=1024, help="size of a body")
    parser.add_argument("--tokens", type=int, default=512, help="length of each stream")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu", help="where weights are generated")
    parser.add_argument("--dir", default="/dev/shm", help="folder for the checkpoint and the body")
    parser.add_argument("--out", type=Path)
    parser.add_argument("vllm", nargs="*", help="more options of vllm serve, after --")
    return parser.parse_args()


if __name__ == "__main__":
    main()
