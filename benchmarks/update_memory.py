# SPDX-License-Identifier: Apache-2.0
"""Measure an update's memory on a rank's GPU, beside the shadow: by torch's allocator, and by the driver.

    python benchmarks/update_memory.py --shape Qwen3-8B --out benchmarks/results/update_memory_h200.json

An idle engine in a process of its own is updated by each transport, twice: what the first one keeps is not taken again.
`allocated`: the most that tensors of the rank took meanwhile, beyond what they took before. `reserved`: the same of the
memory that its allocator holds. `given`: what the GPU gave away between before and after, to whatever process. GPUs only.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from vllm_fp8ext.bench.generated import SHAPES, allowed_dirs, two_checkpoints
from vllm_fp8ext.bench.provenance import provenance, write_cases
from vllm_fp8ext.errors import ConfigError
from vllm_fp8ext.serve.client import Client
from vllm_fp8ext.serve.embedded import embedded_blocking
from vllm_fp8ext.update.transports.wire import stored

TRANSPORTS = ("ipc", "ipc-fp8", "http", "files")


def begin_to_watch(worker: Any) -> None:
    """Called in a worker: from now on its peaks count."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    worker.watched = (
        torch.cuda.memory_allocated(),
        torch.cuda.memory_reserved(),
        torch.cuda.mem_get_info()[0],
    )


def seen(worker: Any) -> dict[str, int]:
    """Called in a worker: bytes since then."""
    torch.cuda.synchronize()
    allocated, reserved, free = worker.watched
    return {
        "allocated": torch.cuda.max_memory_allocated() - allocated,
        "reserved": torch.cuda.max_memory_reserved() - reserved,
        "given": free - torch.cuda.mem_get_info()[0],
    }


def main() -> int:
    options = _options()
    if not torch.cuda.is_available():
        raise ConfigError("expected a GPU: on CPUs nothing counts what tensors take")
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions travel to workers
    from vllm import LLM

    cases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="fp8ext-", dir=options.dir) as scratch:
        folders = two_checkpoints(options.checkpoints, options.shape, Path(scratch), "cuda")
        llm = LLM(
            str(folders[0]),
            quantization="blockfp8",
            max_model_len=1024,
            kv_cache_memory_bytes=4 << 30,
            gpu_memory_utilization=0.4,
            skip_tokenizer_init=True,
            enforce_eager=True,
            additional_config={"fp8ext": {"allowed_dirs": allowed_dirs(folders)}},
        )
        with embedded_blocking(llm) as weights:
            for transport in options.transports:
                for number, folder in enumerate(reversed(folders)):
                    push = _pushed(weights, transport, folder)
                    llm.collective_rpc(begin_to_watch)
                    push()
                    ranks = llm.collective_rpc(seen)
                    labels = {"model": options.shape, "transport": transport, "number": number}
                    cases.append(labels | {name: max(rank[name] for rank in ranks) for name in ranks[0]})
                    del push
    table = Table("transport", "number", "allocated MiB", "reserved MiB", "given MiB")
    for case in cases:
        numbers = (f"{case[name] / 2**20:,.0f}" for name in ("allocated", "reserved", "given"))
        table.add_row(case["transport"], str(case["number"]), *numbers)
    Console().print(table)
    write_cases(options.out, provenance(), cases)
    return 0


def _pushed(weights: Client, transport: str, folder: Path) -> Any:
    """What pushes it; the trainer's tensors are there by now."""
    if transport == "files":
        return lambda: weights.load(folder)
    if transport == "http":
        return lambda: weights.push(folder)
    held = dict(stored(folder))
    return lambda: weights.push(held, transport="ipc", fp8=transport == "ipc-fp8")


def _options() -> Any:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="Qwen3-8B")
    parser.add_argument("--checkpoints", type=Path, nargs=2, help="these instead of generated weights")
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS))
    parser.add_argument("--dir", type=Path, help="folder with room for two checkpoints")
    parser.add_argument("--out", type=Path, help="JSON results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
