# SPDX-License-Identifier: Apache-2.0
"""Ways to change a server's weights that a benchmark of updates times: our client's transports, and vLLM's own means."""

import argparse
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vllm_fp8ext.bench.transports import NATIVE, transport_of
from vllm_fp8ext.demo.server import Server
from vllm_fp8ext.serve.client import Group
from vllm_fp8ext.serve.schema import Running

Push = Callable[[str], dict[str, float]]
"""Change the weights to a version and say what it took."""


@contextlib.contextmanager
def pusher(
    variant: str,
    transport: str,
    policy: Running,
    options: argparse.Namespace,
    server: Server,
    checkpoints: list[Path],
) -> Iterator[Push]:
    """Return a function that changes the weights to checkpoint "a" or "b"."""
    folders = dict(zip("ab", checkpoints, strict=True))
    if transport in NATIVE:
        yield from _native(transport, server, folders, options, stock=variant == "stock")
        return
    if variant == "stock":
        yield from _reload(server, folders)
        return
    way: Any = transport_of(transport)
    with server.client() as client, Group() as group:
        in_memory = set(checkpoints) if way in ("ipc", "nccl") else set()
        held = {path: _in_memory(path, way, options, fused=options.fused) for path in in_memory}

        def push(name: str) -> dict[str, float]:
            folder = folders[name]
            if way == "files":
                done = client.load(folder, version=name, running=policy)
            else:
                done = client.push(
                    held.get(folder, folder),
                    version=name,
                    running=policy,
                    transport=way,
                    group=group,
                    checksum=not transport.endswith("-plain"),
                    fp8=transport.endswith("-fp8"),
                    expert_layout="out_in" if options.fused else None,
                )
            return {"bytes": float(done.bytes), **done.seconds}

        try:
            yield push
        finally:  # what pushed outlives this, and another trainer's tensors need the room
            held.clear()


def _reload(server: Server, folders: dict[str, Path]) -> Iterator[Push]:
    """Update by vLLM's own reload from files."""
    from vllm_fp8ext.loadtest.weight_updates import StockUpdates

    stock = {name: StockUpdates(server.url, [path]) for name, path in folders.items()}

    def reload(name: str) -> dict[str, float]:
        done = stock[name].push()
        if done.error:
            raise RuntimeError(f"stock vLLM's reload: {done.error}")
        return {}

    yield reload


def _native(
    way: str, server: Server, folders: dict[str, Path], options: argparse.Namespace, *, stock: bool
) -> Iterator[Push]:
    """Update by vLLM's own trainer engine."""
    from vllm_fp8ext.bench.native import Native

    held = {name: _in_memory(path, "ipc", options, fused=False) for name, path in folders.items()}
    native = Native(server, way, held["a"], stock=stock)
    try:
        yield lambda name: native.push(held[name])
    finally:
        held.clear()


def _in_memory(checkpoint: Path, way: str, options: argparse.Namespace, *, fused: bool) -> dict[str, Any]:
    """The trainer's tensors: on the GPU that is served from, or for `nccl` on the last one."""
    import torch

    from vllm_fp8ext.bench.fused import stored_fused
    from vllm_fp8ext.serve.client.flat import in_buffers
    from vllm_fp8ext.update.transports.wire import stored

    last = torch.cuda.device_count() - 1
    read = stored_fused if fused else stored
    tensors = read(checkpoint, f"cuda:{last}" if way == "nccl" and last > 0 else None)
    return dict(in_buffers(tensors) if options.buckets else tensors)
