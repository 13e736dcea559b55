# SPDX-License-Identifier: Apache-2.0
"""Measure what copies of an iterable's tensors cost: seconds of whole pushes.

    python benchmarks/push_iterable.py --shape Qwen3-8B --transports ipc http nccl --out push_iterable_h200.json

An idle server is pushed the same weights by each transport in turn, from tensors that are all there. `dict`: a dict of them,
which is taken without a copy. `iterable`: an iterator over the same tensors, each of which is copied. `one buffer`: a
generator that first copies each into one buffer, as gathering does. `flat` (by `ipc`): a dict of tensors in few buffers. The
first round does not count. `peak`: the most that torch held on the pusher's GPU, beyond the weights. Beside the server on one
GPU, `nccl` takes the two for processes of two machines (`NCCL_HOSTID`).
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from vllm_fp8ext.bench.generated import SHAPES, write_checkpoint
from vllm_fp8ext.bench.provenance import provenance, write_cases
from vllm_fp8ext.bench.transports import tensor_transports
from vllm_fp8ext.demo.server import Server, serve_options
from vllm_fp8ext.serve.client import Client, Group
from vllm_fp8ext.serve.client.flat import in_buffers
from vllm_fp8ext.update.transports.wire import stored

Tensors = dict[str, Tensor]


def main() -> int:
    options = _options()
    origin = provenance()
    cases: list[dict[str, Any]] = []
    samples: dict[tuple[str, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="fp8ext-", dir=options.dir) as scratch:
        folder = Path(scratch)
        model = options.checkpoint or folder / "model"
        if not options.checkpoint:
            write_checkpoint(model, options.shape, 0, options.device)
        arguments = ["--skip-tokenizer-init", "--max-model-len", "2048", "--max-num-seqs", "16"]
        arguments += serve_options(options.serve)
        with Server(model, folder / "server.log", arguments=arguments) as server:
            server.wait(1800)
            os.environ["NCCL_HOSTID"] = "the-pusher"
            held = dict(stored(model, options.device))
            size = sum(tensor.nbytes for tensor in held.values())
            with server.client() as client, Group() as group:
                for round in range(options.repeats + 1):
                    for transport in options.transports:
                        for variant, pushed in _variants(held, transport).items():
                            measured = _push(client, pushed, transport, group)
                            if round:
                                samples.setdefault((transport, variant), []).append(measured)
                    cases = [
                        _case(options, size, *which, measured, samples[which[0], "dict"])
                        for which, measured in samples.items()
                    ]
                    write_cases(options.out, origin, cases)
    table = Table("transport", "pushed", "seconds", "against dict", "peak")
    for case in cases:
        peak = f"{case['peak_bytes'] / 1e9:.2f} GB" if case["peak_bytes"] else ""
        table.add_row(
            case["transport"], case["pushed"], f"{case['seconds']:.3f}", f"{case['ratio']:.2f}", peak
        )
    Console().print(table)
    return 0


def _variants(held: Tensors, transport: str) -> dict[str, Any]:
    variants = {"dict": held, "iterable": iter(held.items()), "one buffer": _gathered(held)}
    return variants | ({"flat": partial(_flat, held)} if transport == "ipc" else {})


def _flat(held: Tensors) -> Tensors:
    return dict(in_buffers(held.items()))


def _gathered(held: Tensors) -> Iterator[tuple[str, Tensor]]:
    largest = max(held.values(), key=Tensor.numel)
    buffer = torch.empty(largest.numel(), dtype=largest.dtype, device=largest.device)
    for name, tensor in held.items():
        yield name, buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)


def _push(client: Client, pushed: Any, transport: Any, group: Group) -> dict[str, float]:
    weights = pushed() if callable(pushed) else pushed
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    client.push(weights, transport=transport, group=group if transport == "nccl" else None)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "peak_bytes": torch.cuda.max_memory_allocated() - before if cuda else 0}


def _case(
    options: Any,
    size: int,
    transport: str,
    variant: str,
    samples: list[dict[str, float]],
    against: list[dict[str, float]],
) -> dict[str, Any]:
    seconds = statistics.median(sample["seconds"] for sample in samples)
    usual = statistics.median(sample["seconds"] for sample in against)
    return {
        "model": options.shape,
        "bytes": size,
        "transport": transport,
        "pushed": variant,
        "seconds": seconds,
        "ratio": seconds / usual,
        "peak_bytes": max(sample["peak_bytes"] for sample in samples),
        "samples": samples,
    }


def _options() -> Any:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="Qwen3-0.6B")
    parser.add_argument("--transports", nargs="+", choices=tensor_transports(), default=["http"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default=device, help="where the weights are that are pushed")
    parser.add_argument("--checkpoint", type=Path, help="serve this one instead of generated weights")
    parser.add_argument("--dir", type=Path, help="folder with room for a checkpoint")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", nargs="*", default=[], help="more options of vllm serve: a=b")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
