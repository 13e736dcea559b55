# SPDX-License-Identifier: Apache-2.0
"""Servers of benchmarks: how they are started for updates beside requests, and waited for."""

import argparse
import contextlib
import itertools
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_fp8ext.bench.engines import VARIANTS, with_graphs
from vllm_fp8ext.bench.generated import SHAPES, allowed_dirs, two_checkpoints
from vllm_fp8ext.bench.layouts import Layout
from vllm_fp8ext.demo.server import Server, serve_options

START_SECONDS = 1500.0
"""Longest time that a server may take until it answers."""


def server_arguments(requests: int, serve: Sequence[str], *, longest: int = 4096) -> list[str]:
    """Return arguments of `vllm serve` for so many requests at once, and one more. Each has `longest` tokens at most."""
    return [
        *("--skip-tokenizer-init", "--max-model-len", str(longest)),
        *("--max-num-seqs", str(max(16, requests + 1)), *serve_options(serve)),
    ]


def wait_for_all(servers: Mapping[str, Server], console: Console) -> None:
    """Wait until each server answers, and print how long that took. None is measured before."""
    for name, server in servers.items():
        began = time.monotonic()
        server.wait(START_SECONDS)
        console.print(f"{name}: answers after {time.monotonic() - began:.0f} s")


@contextlib.contextmanager
def variant_servers(
    folder: Path,
    variants: Sequence[str],
    arguments: Sequence[str],
    *,
    kv: str,
    kv_gib: float,
    console: Console,
    settings: Sequence[Mapping[str, Any]] = ({},),
    layouts: Sequence[Layout] = (Layout(),),
) -> Iterator[dict[tuple[str, Layout], list[Server]]]:
    """Yield servers by name and layout once all answer: the replicas of each. They share the same GPUs.

    `settings`: of blockfp8, as many servers. `kv`: dtype of each server's KV cache, of `kv_gib` GiB; blockfp8 calibrates
    the scales of an FP8 one. `arguments`: more of `vllm serve`, which come last.
    """
    shared = [
        *("--kv-cache-dtype", kv, "--kv-cache-memory-bytes", str(int(kv_gib * (1 << 30)))),
        # vLLM looks whether so much is free, though the cache is of a given size: the others have taken some by then
        *("--gpu-memory-utilization", "0.1", *arguments),
    ]
    scales = {"kv_scales": {"policy": "calibrate"}} if kv.startswith("fp8") else {}
    servers: dict[tuple[str, Layout], list[Server]] = {}
    with tempfile.TemporaryDirectory() as logs, contextlib.ExitStack() as stack:
        for layout, variant in itertools.product(layouts, variants):
            quantization = VARIANTS[variant].get("quantization")
            for chosen in settings if variant == "blockfp8" else ({},):
                name = f"{variant} {json.dumps(chosen)}" if chosen else variant
                own = (
                    {"settings": with_graphs({**scales, **chosen})}
                    if variant == "blockfp8"
                    else {"stock": True}
                )
                more = ["--quantization", quantization] if quantization and variant != "blockfp8" else []
                for replica in range(layout.replicas):
                    server = Server(
                        folder,
                        Path(logs) / f"{len(servers)}-{replica}",
                        arguments=[*shared, *more, *layout.arguments()],
                        variables=layout.variables(replica),
                        **own,
                    )
                    servers.setdefault((name, layout), []).append(stack.enter_context(server))
        every = {
            f"{name}, {layout}, {number}": server
            for (name, layout), replicas in servers.items()
            for number, server in enumerate(replicas)
        }
        wait_for_all(every, console)
        yield servers


def add_update_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a script that updates one server."""
    parser.add_argument("--shape", choices=SHAPES, default="Qwen3-8B")
    parser.add_argument("--checkpoints", type=Path, nargs=2, help="serve these instead of generated weights")
    parser.add_argument("--serve", nargs="*", default=[], help="more options of vllm serve: a=b")
    parser.add_argument("--dir", type=Path, help="folder with room for two checkpoints")
    parser.add_argument("--out", type=Path, help="write the cases here, as JSON")


@contextlib.contextmanager
def updated_server(
    options: argparse.Namespace, requests: int, *, longest: int = 4096
) -> Iterator[tuple[Server, list[Path]]]:
    """Yield a server that answers, and the two checkpoints between which it is updated; it serves the first."""
    with tempfile.TemporaryDirectory(prefix="fp8ext-", dir=options.dir) as scratch:
        folder = Path(scratch)
        checkpoints = two_checkpoints(options.checkpoints, options.shape, folder)
        arguments = server_arguments(requests, options.serve, longest=longest)
        settings = {"allowed_dirs": allowed_dirs(checkpoints)}
        with Server(checkpoints[0], folder / "server.log", arguments=arguments, settings=settings) as server:
            server.wait(START_SECONDS)
            yield server, checkpoints
