# SPDX-License-Identifier: Apache-2.0
"""Cost of updates: seconds from open to the commit's answer, pauses, gaps in streams, tokens lost.

    fp8ext bench update --shape Qwen3-8B --transports files http ipc --running 0 128 --out update.json

Serves generated weights (or --checkpoints) and changes them back and forth, from the first update on: nothing is warmed up.
With running requests, updates follow each other without a break for --busy-seconds, and the rate of tokens is compared with
those before and after; that is done --windows times, and what was lost over the whole is told, of gaps the longest. Without,
`http` and `files` take turns with a baseline of the same bytes (`bare`), and `ratio_bare` is the update's time by the
baseline's.
`stock` is vLLM's own reload of `fp8_per_block` from files. `native` and `native-packed` are vLLM's own weight transfer by
CUDA IPC, to our server and to stock's; `native-typed` is the same to ours, with typed handles. Of these `transfer s` is the
time from `start` to the answer of `finish`, without the pause around a stock server's. `http-plain` is `http` without
checksums. With `nccl` the server is kept off the last GPU, from which the trainer broadcasts. Where `--layout` takes all of
them, one is shared: NCCL takes the trainer for another machine then, and reaches it through the network.
"""

import argparse
import contextlib
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_fp8ext.bench.background import Background
from vllm_fp8ext.bench.bare import baseline
from vllm_fp8ext.bench.generated import SHAPES, allowed_dirs, two_checkpoints
from vllm_fp8ext.bench.layouts import Layout, visible_gpus
from vllm_fp8ext.bench.options import CommandLine, json_object
from vllm_fp8ext.bench.peak_memory import PeakMemory
from vllm_fp8ext.bench.provenance import provenance, write_cases
from vllm_fp8ext.bench.servers import server_arguments, wait_for_all
from vllm_fp8ext.bench.transports import NATIVE, push_variants, transport_of
from vllm_fp8ext.bench.update_pushers import Push, pusher
from vllm_fp8ext.demo.server import Server
from vllm_fp8ext.serve.schema import Running

VARIANTS = ("blockfp8", "stock")
POLICIES: tuple[Running, ...] = ("keep", "recompute")
console = Console(width=140, highlight=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as the command line says; the exit code."""
    options = _parser().parse_args(arguments)
    options.layout = Layout.of(options.layout)
    origin = provenance()
    cases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="fp8ext-", dir=options.dir) as scratch:
        folder = Path(scratch)
        checkpoints = two_checkpoints(options.checkpoints, options.shape, folder)
        start = partial(_server, options=options, model=checkpoints[0], folder=folder)
        with contextlib.ExitStack() as stack:
            ahead = {}
            if options.together:
                ahead = {variant: stack.enter_context(start(variant)) for variant in options.variants}
            wait_for_all(ahead, console)  # none starts beside what is measured
            for variant in options.variants:
                with contextlib.nullcontext(ahead[variant]) if ahead else start(variant) as server:
                    if not ahead:
                        wait_for_all({variant: server}, console)
                    for measured in _measure(variant, options, server, checkpoints):
                        cases += measured
                        write_cases(options.out, origin, cases)
    _show(cases)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandLine("update", __doc__)
    parser.add_choice("--shape", SHAPES, "Qwen3-8B", "of the model", nargs=None)
    parser.add_argument("--checkpoints", type=Path, nargs=2, help="serve these instead of generated weights")
    parser.add_choice("--variants", VARIANTS, ["blockfp8"], "servers")
    parser.add_choice("--transports", push_variants(), ["files", "http"], "in turn")
    parser.add_argument("--running", type=int, nargs="+", default=[0], help="requests beside the updates")
    parser.add_choice("--policy", POLICIES, ["keep"], "for running requests, in turn")
    parser.add_argument(
        "--fused", action="store_true", help="ipc, nccl: experts fused, as transformers holds them"
    )
    parser.add_argument(
        "--buckets",
        action="store_true",
        help="ipc, nccl: tensors in buffers of a GiB, as flat parameters are",
    )
    parser.add_argument("--repeats", type=int, default=5, help="updates of each case on an idle server")
    parser.add_argument(
        "--busy-seconds", type=float, default=10.0, help="of updates beside requests at a time, at least"
    )
    parser.add_argument("--windows", type=int, default=3, help="how often that is repeated")
    parser.add_argument(
        "--together",
        action="store_true",
        help="start all servers at once, where they have room beside each other",
    )
    parser.add_argument("--settings", type=json_object, default={}, help="more settings of fp8ext, as JSON")
    parser.add_argument("--serve", nargs="*", default=[], help="more options of vllm serve: a=b")
    parser.add_argument("--layout", default="one", help="of the server over GPUs: such as tp2 or dp2")
    parser.add_argument("--dir", type=Path, help="folder with room for two checkpoints")
    return parser


def _server(variant: str, options: argparse.Namespace, model: Path, folder: Path) -> Server:
    longest = max(options.running)
    arguments = [*server_arguments(longest, options.serve), *options.layout.arguments()]
    native = not set(NATIVE).isdisjoint(options.transports)
    if native:
        from vllm_fp8ext.bench.native import SERVE, SETTINGS, STOCK_VARIABLES

        arguments += SERVE
    if variant == "stock":
        arguments += ["--quantization", "fp8_per_block"]
        variables = STOCK_VARIABLES if native else {}
        return Server(model, folder / "stock.log", arguments=arguments, variables=variables, stock=True)
    settings = {"allowed_dirs": allowed_dirs(options.checkpoints or [folder / "a"]), **options.settings}
    settings |= SETTINGS if native else {}
    variables = options.layout.variables(0)
    if any(_shares(name, options.layout) for name in options.transports):
        # processes of one machine cannot share a GPU in a group
        os.environ["NCCL_HOSTID"] = "the-trainer"
        variables |= {"NCCL_HOSTID": "the-server"}
    log = folder / "blockfp8.log"
    return Server(model, log, arguments=arguments, settings=settings, variables=variables)


def _shares(transport: str, layout: Layout) -> bool:
    """Tell whether a trainer that broadcasts shares the last GPU with a rank."""
    return transport_of(transport) == "nccl" and len(visible_gpus()) == layout.ranks


def _measure(
    variant: str, options: argparse.Namespace, server: Server, checkpoints: list[Path]
) -> Iterator[list[dict[str, Any]]]:
    """Cases as they are measured."""
    transports = options.transports
    if variant == "stock":
        transports = [*(way for way in transports if way in NATIVE and way != "native-typed"), "reload"]
    weights = itertools.cycle(range(2))
    next(weights)  # the first is served
    for running in options.running:
        with contextlib.ExitStack() as stack:
            load = stack.enter_context(Background(server.url, running)) if running else None
            policies = options.policy if running and variant != "stock" else options.policy[:1]
            for transport, policy in itertools.product(transports, policies):
                case = {
                    "model": options.shape,
                    "transport": transport,
                    "variant": variant,
                    "load": running,
                }
                settings = {} if variant == "stock" else options.settings
                staging = "none" if variant == "stock" else settings.get("staging", "shadow")
                case |= {"running": policy, "staging": staging, "settings": settings}
                case |= {name: True for name in ("fused", "buckets") if getattr(options, name)}
                case |= options.layout.facts()
                case |= {"shared_gpu": True} if _shares(transport, options.layout) else {}
                with (
                    pusher(variant, transport, policy, options, server, checkpoints) as push,
                    contextlib.nullcontext() if running else baseline(transport) as bare,
                ):
                    beside = partial(bare, checkpoints[0]) if bare else lambda: None
                    case |= _updates(options, load, partial(_next, push, weights), beside)
                cases = [case]
                if bare:
                    cases.append(bare.case(options.shape, transport))
                    case["ratio_bare"] = case["total_seconds"] / cases[-1]["total_seconds"]
                console.print(
                    {name: value for name, value in case.items() if name not in ("samples", "windows")}
                )
                yield cases


def _next(push: Push, weights: Iterator[int]) -> dict[str, float]:
    return push("ab"[next(weights)])


def _updates(
    options: argparse.Namespace,
    load: Background | None,
    push: Callable[[], dict[str, float]],
    beside: Callable[[], None],
) -> dict[str, Any]:
    """Idle: `repeats` of them, each by itself, in turns with what is measured `beside` them. Beside requests: one after the
    other for a while, and that several times."""
    samples: list[dict[str, float]] = []
    windows: list[dict[str, Any]] = []

    def update() -> None:
        start = time.monotonic()
        seconds = push()
        samples.append({"seconds": time.monotonic() - start, **seconds})

    with PeakMemory() as memory:
        if load:
            for number in range(options.windows):
                load.settle(rested=number > 0)
                windows.append(_window(options.busy_seconds, load, update))
        else:
            for _ in range(options.repeats):
                update()
                beside()
                time.sleep(0.2)
    totals = [sample["seconds"] for sample in samples]
    pauses = [sample["pause"] for sample in samples if "pause" in sample]
    transfers = [sample["transfer"] for sample in samples if "transfer" in sample]
    case: dict[str, Any] = {
        "total_seconds": statistics.median(totals),
        "first_seconds": totals[0],
        "pause_seconds": max(pauses, default=None),
        "transfer_seconds": statistics.median(transfers) if transfers else None,
        "bytes": samples[0].get("bytes"),
        "peak_extra_bytes": memory.peak,
        "samples": samples,
    }
    return case | (_over(windows) if load else {})


def _window(seconds: float, load: Background, update: Callable[[], None]) -> dict[str, Any]:
    """Updates for so long, and what became of the requests beside them."""
    begin = time.monotonic()
    count = 0
    while not count or time.monotonic() < begin + seconds:
        update()
        count += 1
    return {"updates": count, **load.during(begin, time.monotonic())}


def _over(windows: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge windows of the same length: means of rates, the longest gap, all tokens lost.

    The windows themselves are among the result."""
    rates = ("tokens_per_s_before", "tokens_per_s_during", "tokens_per_s_after")
    case: dict[str, Any] = {name: statistics.fmean(window[name] for window in windows) for name in rates}
    before, during, after = (case[name] for name in rates)
    case["tokens_lost"] = 1 - 2 * during / (before + after)
    for name in ("stall_seconds", "longest_gap_before"):
        case[name] = max((window[name] for window in windows if window[name] is not None), default=None)
    case["steady_before"] = all(window["steady_before"] for window in windows)
    return {**case, "windows": windows}


def _show(cases: list[dict[str, Any]]) -> None:
    names = ("median s", "first s", "transfer s", "pause s", "stall s", "lost", "peak GB", "x bare")
    table = Table("variant", "load", "transport", "running", *names)
    for case in cases:
        peak = case.get("peak_extra_bytes")
        numbers = (
            *(case["total_seconds"], case["first_seconds"]),
            *(case.get("transfer_seconds"), case.get("pause_seconds")),
            *(case.get("stall_seconds"), case.get("tokens_lost")),
            *(peak and peak / 1e9, case.get("ratio_bare")),
        )
        texts = ["" if number is None else f"{number:.3f}" for number in numbers]
        what = (case["variant"], str(case["load"]), case["transport"], case.get("running", ""))
        table.add_row(*what, *texts)
    console.print(table)
