# SPDX-License-Identifier: Apache-2.0
"""The demo itself: what it does, what must hold, and the table that it shows."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from openai import AsyncOpenAI
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from safetensors.torch import load_file, save_file

from vllm_fp8ext.checkpoints import EARLY, LATE, problems
from vllm_fp8ext.demo.server import SMALL, Server
from vllm_fp8ext.demo.traffic import Completion, accuracy, answers, traffic
from vllm_fp8ext.environment import URL
from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve import schema
from vllm_fp8ext.serve.client import Client

_TOKENS = 240
_ATTEMPTS = 8
_RUNNING = 12
_STREAMED = 1


@dataclass
class DemoReport:
    """Rows of the table, and whether each is as it should be."""

    rows: list[tuple[str, str, bool]] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)

    def add(self, what: str, value: str, ok: bool = True) -> None:
        self.rows.append((what, value, ok))

    @property
    def ok(self) -> bool:
        return all(ok for _, _, ok in self.rows)

    def table(self) -> Table:
        table = Table(title="fp8ext demo", title_justify="left")
        table.add_column("what")
        table.add_column("found")
        table.add_column("")
        for what, value, ok in self.rows:
            table.add_row(escape(what), escape(value), "[green]ok[/]" if ok else "[bold red]NOT OK[/]")
        return table


def run(count: int, json_file: Path | None) -> int:
    """Run everything; 0 when all is as it should be, 1 when not."""
    console = Console()
    report = DemoReport()
    with tempfile.TemporaryDirectory(prefix="fp8ext-demo-") as folder:
        try:
            _run(count, Path(folder), report, console)
        except (RuntimeError, UpdateError, subprocess.SubprocessError) as error:
            report.add("ran to its end", str(error), False)
    console.print(report.table())
    if json_file:
        rows = [{"what": what, "found": value, "ok": ok} for what, value, ok in report.rows]
        json_file.write_text(json.dumps({"ok": report.ok, "rows": rows, **report.data}, indent=1) + "\n")
    return 0 if report.ok else 1


def _run(count: int, folder: Path, report: DemoReport, console: Console) -> None:
    sums = problems(count)
    with (
        Server(EARLY, folder / "fp8.log", arguments=SMALL) as fp8,
        Server(EARLY, folder / "bf16.log", arguments=SMALL, settings={"ignore": ["*"]}) as bf16,
    ):
        with _step(
            console, "starting two real servers on the early checkpoint (blockfp8, and BF16 beside it)"
        ):
            fp8.wait()
            bf16.wait()
        with _step(console, f"asking {count} held-out problems, before the update"):
            before = {
                name: accuracy(answers(s.url, sums), sums) for name, s in (("fp8", fp8), ("bf16", bf16))
            }
        with _step(console, "pushing the late checkpoint while requests run"):
            update, streams, span = asyncio.run(_push_under_traffic(fp8))
            with bf16.client() as client:
                client.push(LATE, version="late")
        with _step(console, f"asking {count} held-out problems, after the update"):
            after_update = answers(fp8.url, sums)
            after = {"fp8": accuracy(after_update, sums), "bf16": accuracy(answers(bf16.url, sums), sums)}
        _add_accuracy(report, before, after)
        _add_update(report, update, streams, max(seen.longest_gap(*span) for seen in streams))
        with _step(console, "comparing digests, and trying updates that must be refused"):
            _add_digests(report, fp8)
            served = fp8.client().digests().model_dump()
            for name, kind, spoil in (
                ("NaN in one tensor", "non-finite", _nan),
                ("q_proj alone", "incomplete", _lone),
            ):
                _add_refusal(report, fp8, name, kind, spoil(folder))
            same = answers(fp8.url, sums) == after_update and fp8.client().digests().model_dump() == served
            report.add("answers and digests after both refusals", "unchanged" if same else "changed", same)


async def _push_under_traffic(server: Server) -> tuple[schema.Update, list[Completion], tuple[float, float]]:
    """The update, the requests that ran meanwhile, and when it began and ended."""

    def push(weights: Client) -> tuple[schema.Update, tuple[float, float]]:
        start = time.perf_counter()
        update = weights.push(LATE, version="late")
        return update, (start, time.perf_counter())

    async def attempt(weights: Client) -> tuple[schema.Update, list[Completion], tuple[float, float]]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            (update, span), completions = await traffic(
                client, prompts, _TOKENS, lambda: asyncio.to_thread(push, weights), streamed=_STREAMED
            )
        return update, completions, span

    prompts = [problem.prompt for problem in problems(_RUNNING, seed=1)]
    with server.client() as weights:
        attempted = await attempt(weights)
        for _ in range(_ATTEMPTS - 1):
            if any(seen.straddles for seen in attempted[1]):
                break
            # on a machine with few cores the commit may find that all requests have just ended: back, and once more
            await asyncio.to_thread(weights.rollback)
            attempted = await attempt(weights)
    return attempted


def _add_accuracy(report: DemoReport, before: dict[str, float], after: dict[str, float]) -> None:
    report.data["accuracy"] = {"before": before, "after": after}
    for name, label in (("bf16", "BF16"), ("fp8", "FP8")):
        ok = before[name] < 0.5 and after[name] > 0.98
        report.add(f"accuracy {label}", f"{before[name]:.1%} early → {after[name]:.1%} late", ok)


def _add_update(report: DemoReport, update: schema.Update, streams: list[Completion], stall: float) -> None:
    straddling = [seen for seen in streams if seen.straddles]
    witness = straddling[0].weight_versions if straddling else []
    spans = ", ".join(f"{span['version']} [{span['start']}, {span['end']})" for span in witness)
    report.add("a request that straddles the commit", spans or "none", len(witness) == 2)
    report.add("requests that straddle the commit", f"{len(straddling)} of {len(streams)}")
    seconds = update.seconds
    report.add("bytes", f"{update.bytes:,} in {len(update.chunks)} chunk(s)")
    phases = ", ".join(
        f"{name} {seconds[name] * 1e3:.1f}" for name in ("staging", "prepare", "drain", "exchange", "caches")
    )
    report.add("phases, ms", f"{phases}; total {seconds['total'] * 1e3:.0f}")
    report.add(
        "stall",
        f"{stall * 1e3:.1f} ms longest gap in a stream during the update; engine paused {seconds['pause'] * 1e3:.1f} ms",
    )
    error = update.quantization_error.relative if update.quantization_error else 0.0
    report.add("quantization error", f"{error:.2%} of the weights' norm", 0 < error < 0.05)
    report.data["update"] = update.model_dump()
    report.data["stall_seconds"] = stall
    report.data["weight_versions"] = witness


def _add_digests(report: DemoReport, server: Server) -> None:
    served = server.client().digests()
    line = [sys.executable, "-m", "vllm_fp8ext.cli", "digest", str(LATE), "--json"]
    environment = {name: value for name, value in os.environ.items() if name != URL}  # no server's manifest
    done = subprocess.run(line, check=True, capture_output=True, text=True, env=environment)
    alone = json.loads(done.stdout)
    same = served.digests == alone
    report.add(
        "served digests and `fp8ext digest`", f"{len(alone)} tensors {'equal' if same else 'DIFFER'}", same
    )


def _add_refusal(report: DemoReport, server: Server, name: str, kind: str, checkpoint: Path) -> None:
    with server.client() as client:
        try:
            client.push(checkpoint, version="bad")
            report.add(f"push with {name}", "was accepted", False)
        except UpdateError as error:
            detail = str(error) if len(str(error)) < 90 else f"{str(error)[:90]}…"
            report.add(f"push with {name}", f"refused: {error.kind} ({detail})", error.kind == kind)


def _nan(folder: Path) -> Path:
    tensors = load_file(LATE / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    return _saved(tensors, folder / "nan.safetensors")


def _lone(folder: Path) -> Path:
    name = "model.layers.0.self_attn.q_proj.weight"
    return _saved({name: load_file(LATE / "model.safetensors")[name]}, folder / "lone.safetensors")


def _saved(tensors: dict[str, torch.Tensor], file: Path) -> Path:
    save_file(tensors, file)
    return file


@contextmanager
def _step(console: Console, what: str) -> Iterator[None]:
    with console.status(what):
        yield
    console.print(f"[green]✓[/] {what}")
