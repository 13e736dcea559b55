# SPDX-License-Identifier: Apache-2.0
"""Servers behind a router: how far apart their commits are, and what clients see while one joins. Tiny models, real servers.

    python benchmarks/replicas.py --router vllm-router --out benchmarks/results/replicas_cpu.json

Two servers serve behind vLLM's router, and a third one, started with `ready` `when_current`, joins. Clients ask the router
all the time. Skew: the time between the first and the last `served_at` of one push. All servers are on this machine, so it is
one clock. Answers are told apart by the instance that their tokens name.
"""

import argparse
import json
import secrets
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from vllm_fp8ext.bench.provenance import provenance, write_cases
from vllm_fp8ext.checkpoints import EARLY, LATE
from vllm_fp8ext.demo.server import MODEL, SMALL, Server
from vllm_fp8ext.serve import schema
from vllm_fp8ext.serve.client import Replicas

START_SECONDS = 600.0


def main() -> None:
    """Start everything, push, and write what was measured."""
    options = _options()
    key = secrets.token_urlsafe(16)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fp8ext-")))
        settings: list[dict[str, Any]] = [{}, {}, {"ready": "when_current"}]
        servers = [
            stack.enter_context(Server(EARLY, folder / f"{n}.log", arguments=SMALL, settings=each, key=key))
            for n, each in enumerate(settings)
        ]
        for server in servers:
            _await(f"{server.url}/version", server.process)
        router = stack.enter_context(_router(options.router, servers, folder / "router.log"))
        cases = _measured(options, router, servers)
    for case in cases:
        Console().print_json(json.dumps(case))
    write_cases(options.out, provenance(), cases, router=options.router_version)


def _measured(options: Any, router: str, servers: list[Server]) -> list[dict[str, Any]]:
    late, urls = servers[2], [server.url for server in servers]
    key, instance = late.key, _weights(late).instance or ""
    with Replicas(urls[:2], key) as two, Replicas(urls, key) as all_three:
        cases = [_skew("idle", two, options.updates, 0)]
        with _traffic(router, options.clients) as seen:
            cases.append(_skew("busy", two, options.updates, options.updates))
            before = len(seen)
            start = time.perf_counter()
            told = all_three.catch_up(_checkpoint(2 * options.updates - 1))
            seconds = time.perf_counter() - start
            assert list(told) == [late.url], told
            time.sleep(options.seconds)
            cases.append(_skew("busy", all_three, options.updates, 2 * options.updates))
            time.sleep(options.seconds)
    at_router = _answers(seen, before, instance)
    versions = {_weights(server).version for server in servers}
    assert len(versions) == 1, versions
    return [*cases, {"case": "catch up", "seconds": seconds}, {"case": "router", **at_router}]


def _checkpoint(n: int) -> Path:
    return (LATE, EARLY)[n % 2]


def _skew(kind: str, replicas: Replicas, updates: int, begin: int) -> dict[str, Any]:
    """Push some updates; the first one makes connections and does not count."""
    samples = []
    count = 0
    for n in range(begin, begin + updates):
        done = replicas.push(_checkpoint(n), version=str(n))
        served = [(update.result or {})["served_at"] for update in done.values()]
        samples.append(1e3 * (max(served) - min(served)))
        count = len(served)
    samples = sorted(samples[1:])
    return {
        "case": "commit skew",
        "variant": f"{kind}, {count} servers",
        "unit": "ms",
        "updates": len(samples),
        "median": statistics.median(samples),
        "p90": samples[int(0.9 * (len(samples) - 1))],
        "max": samples[-1],
        "above_100_ms": sum(sample > 100 for sample in samples),
    }


def _answers(seen: list[tuple[int, str, str]], before: int, late: str) -> dict[str, Any]:
    """Sum up what clients of the router have seen. `before`: answers until the late server began to catch up."""
    of_late = [at for at, (_, instance, _) in enumerate(seen) if instance == late]
    return {
        "answers": len(seen),
        "statuses": dict(Counter(str(status) for status, _, _ in seen)),
        "of_the_late_server_before": sum(at < before for at in of_late),
        "of_the_late_server_after": sum(at >= before for at in of_late),
        "versions_of_the_late_server": sorted({seen[at][2] for at in of_late}),
    }


@contextmanager
def _traffic(router: str, clients: int) -> Iterator[list[tuple[int, str, str]]]:
    """Completions one after the other in each of some threads: status, and instance and version of the first token."""
    seen: list[tuple[int, str, str]] = []
    stop = threading.Event()

    def ask(number: int) -> None:
        body = {
            "model": MODEL,
            "prompt": f"{number}+2=",
            "max_tokens": 48,
            "ignore_eos": True,
            "temperature": 0,
        }
        with httpx.Client(timeout=120, trust_env=False) as http:
            while not stop.is_set():
                answer = http.post(f"{router}/v1/completions", json=body)
                spans = answer.json()["choices"][0].get("weight_versions") if answer.is_success else None
                span = spans[0] if spans else {}
                seen.append((answer.status_code, span.get("instance", ""), span.get("version", "")))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@contextmanager
def _router(program: str, servers: Sequence[Server], log: Path) -> Iterator[str]:
    """vLLM's router in front of servers, which it asks for their health each second."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = [program, "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"]
    line += ["--worker-urls", *(server.url for server in servers), "--health-check-interval-secs", "1"]
    line += ["--health-failure-threshold", "1", "--health-success-threshold", "1"]
    line += ["--worker-startup-timeout-secs", "20"]
    with log.open("wb") as file:
        process = subprocess.Popen(line, stdout=file, stderr=subprocess.STDOUT)
    try:
        _await(f"http://127.0.0.1:{port}/readiness", process)  # its /health needs all servers
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def _await(url: str, process: "subprocess.Popen[bytes]") -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            if httpx.get(url, timeout=5, trust_env=False).is_success:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise RuntimeError(f"{url} did not answer")


def _weights(server: Server) -> schema.Weights:
    with server.client() as client:
        return client.weights()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Skew of commits, and a server that joins behind a router.")
    parser.add_argument("--router", default="vllm-router", help="the program of vLLM's router")
    parser.add_argument("--router-version", default="", help="written into the results")
    parser.add_argument("--updates", type=int, default=21, help="pushes for each case")
    parser.add_argument("--clients", type=int, default=4, help="clients that ask the router")
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="of traffic after the late server has joined"
    )
    parser.add_argument("--out", type=Path, help="file of the results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
