# SPDX-License-Identifier: Apache-2.0
"""Servers of benchmarks: how they are started for updates beside requests, and waited for."""

import argparse
import contextlib
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from vllm_fp8ext.bench.generated import SHAPES, allowed_dirs, two_checkpoints
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
