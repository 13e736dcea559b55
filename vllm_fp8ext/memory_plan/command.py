# SPDX-License-Identifier: Apache-2.0
"""`fp8ext plan`."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from vllm_fp8ext.config import GIB
from vllm_fp8ext.memory_plan.gpus import GPUS, Gpu, gpu
from vllm_fp8ext.memory_plan.memory import UTILIZATION, Row, Serving, overhead, rows
from vllm_fp8ext.memory_plan.model import Model, read_model

_POSITIVE = click.IntRange(min=1)
UNBOUNDED = 10_000
"""Columns where the output is no terminal: the table is as wide as it needs to be."""


@click.command()
@click.argument("model")
@click.option("--gpu", "gpu_name", metavar="NAME", help=f"One of {', '.join(GPUS)}.")
@click.option(
    "--memory-gib",
    type=click.FloatRange(min=0, min_open=True),
    help="Memory of the GPU as CUDA reports it, instead.",
)
@click.option("--context", type=_POSITIVE, help="Tokens of each request, in and out. [default: all it takes]")
@click.option("--tp", type=_POSITIVE, default=1, show_default=True, help="Tensor-parallel ranks.")
@click.option(
    "--gpu-memory-utilization",
    type=click.FloatRange(0, 1, min_open=True),
    default=UTILIZATION,
    show_default=True,
    help="As vLLM's.",
)
@click.option("--kv-cache-memory-bytes", type=_POSITIVE, help="As vLLM's: the size of the KV cache itself.")
@click.option("--block-size", type=_POSITIVE, default=16, show_default=True, help="As vLLM's.")
@click.option("--max-num-batched-tokens", type=_POSITIVE, help="As vLLM's. [default: vLLM's for this GPU]")
@click.option("--max-num-seqs", type=_POSITIVE, help="As vLLM's. [default: vLLM's for this GPU]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, in bytes.")
def plan(
    model: str,
    gpu_name: str | None,
    memory_gib: float | None,
    context: int | None,
    tp: int,
    gpu_memory_utilization: float,
    kv_cache_memory_bytes: int | None,
    block_size: int,
    max_num_batched_tokens: int | None,
    max_num_seqs: int | None,
    as_json: bool,
) -> None:
    """Tell what fits on a GPU, in BF16 and FP8: weights, the shadow of live updates, KV-cache blocks, the largest batch.

    MODEL is a folder with a config.json, such a file, or a name on the Hub; weights are not read. Needs torch and
    transformers, no GPU.
    """
    device = None if kv_cache_memory_bytes and not (gpu_name or memory_gib) else gpu(gpu_name, memory_gib)
    shape = read_model(model)
    serving = Serving(
        context=context or shape.max_context,
        total=device.total if device else None,
        utilization=gpu_memory_utilization,
        kv_bytes=kv_cache_memory_bytes,
        tp=tp,
        block_size=block_size,
        batched_tokens=max_num_batched_tokens or (device.max_num_batched_tokens if device else 2048),
        seqs=max_num_seqs or (device.max_num_seqs if device else 256),
    )
    planned = rows(shape, serving)
    if as_json:
        click.echo(json.dumps(_data(shape, device.name if device else None, serving, planned), indent=2))
        return
    console = Console(width=None if sys.stdout.isatty() else UNBOUNDED)
    console.print(_table(shape, device.name if device else None, serving, planned))
    for line in _notes(shape, serving, planned, device):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _data(model: Model, gpu_name: str | None, serving: Serving, planned: list[Row]) -> dict[str, Any]:
    return {
        "model": model.name,
        "gpu": gpu_name,
        "serving": asdict(serving),
        "overhead_bytes": overhead(model, serving),
        "rows": [{**asdict(row), "ratio": _ratio(row, planned)} for row in planned],
    }


def _ratio(row: Row, planned: list[Row]) -> float | None:
    """KV tokens against those of BF16 with a BF16 KV cache."""
    return row.tokens / planned[0].tokens if planned[0].tokens else None


def _table(model: Model, gpu_name: str | None, serving: Serving, planned: list[Row]) -> Table:
    where = [gpu_name or f"{serving.kv_bytes:,} bytes of KV cache"]
    where += [f"tensor parallel {serving.tp}, each rank"] if serving.tp > 1 else []
    name = Path(model.name).resolve().name if Path(model.name).exists() else model.name
    title = f"{name} on {', '.join(where)}: batches of {serving.context:,} tokens"
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )
    for heading in ("weights", "KV"):
        table.add_column(heading, overflow="fold")
    for heading in ("GiB", "shadow", "KV B/token", "blocks", "KV tokens", "batch", "× BF16"):
        table.add_column(heading, justify="right", overflow="fold")  # no digit is left out
    for row in planned:
        ratio = _ratio(row, planned)
        table.add_row(
            _weights(row),
            row.kv.upper(),
            f"{row.weight_bytes / GIB:.2f}",
            f"{row.twin_bytes / GIB:.2f}" if row.twin_bytes else "–",
            f"{row.kv_bytes_per_token:,}",
            f"{row.blocks:,}",
            f"{row.tokens:,}",
            f"{row.batch:,}",
            f"{ratio:.2f}" if ratio else "–",
        )
    return table


def _weights(row: Row) -> str:
    return row.weights.upper() + (" + shadow" if row.twin_bytes else "")


def _notes(model: Model, serving: Serving, planned: list[Row], device: Gpu | None) -> list[str]:
    stagings = {bool(row.twin_bytes): row.staging for row in planned}
    notes = [
        f"GiB of weights and shadow. FP8 + shadow: staging {stagings[True]}, the default. FP8: {stagings[False]}."
    ]
    if device and not device.serves_blockfp8:
        notes.append(
            f"blockfp8 needs Hopper or newer: on {device.name} only the rows of BF16 weights can be had."
        )
    if serving.total is not None:
        share = "" if serving.kv_bytes is not None else f" × {serving.utilization:g}"
        notes.append(
            f"{serving.total / GIB:.2f} GiB{share}, of which activations and graphs about "
            f"{overhead(model, serving) / GIB:.2f} (steps of {serving.batched_tokens} tokens, {serving.seqs} requests)."
        )
    if len(set(model.windows)) > 1 or model.windows[0]:
        sliding = sum(window is not None for window in model.windows)
        notes.append(
            f"{sliding} of {len(model.windows)} layers keep a sliding window only; KV bytes per token count all."
        )
    if model.experts_per_token and serving.tp > 1:
        notes.append(
            "Experts divided among the ranks by their width; with --enable-expert-parallel they take as much, less padding."
        )
    notes += [
        f"{_weights(row)} with {row.kv.upper()} KV does not fit: {row.short_bytes / GIB:.2f} GiB short of one request."
        for row in planned
        if row.short_bytes
    ]
    return notes
