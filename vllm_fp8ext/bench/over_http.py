# SPDX-License-Identifier: Apache-2.0
"""Tokens per second over HTTP: BF16, stock `fp8_per_block` and `blockfp8`, each a real server, in turn.

    fp8ext bench http --shape Qwen3-8B --kv fp8 --kv-gib 22 --out served.json

All servers run side by side on the same GPUs and take turns, so that they see the same GPU and the same host. Requests are a
trainer's: token ids in and out, temperature 1, several samples of a prompt, with and without logprobs, streamed and not.
Weights are generated (or given, --checkpoint), as is a tokenizer for them, so that answers have texts. Every server first
answers a short load unmeasured. `--layouts` spreads servers over several GPUs: `tp2` and `dp2` are one server of as many
tensor- or data-parallel ranks, `replicas2` are two servers that are asked in turn.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_fp8ext.bench.engines import VARIANTS
from vllm_fp8ext.bench.generated import SHAPES, checkpoint
from vllm_fp8ext.bench.http_client import ROUTES, Clients, HttpLoad
from vllm_fp8ext.bench.layouts import Layout
from vllm_fp8ext.bench.options import CommandLine, json_object
from vllm_fp8ext.bench.provenance import provenance, write_cases
from vllm_fp8ext.bench.servers import variant_servers
from vllm_fp8ext.bench.tokenizer import text_tokens, write_tokenizer
from vllm_fp8ext.demo.server import Server, serve_options
from vllm_fp8ext.errors import ConfigError

STEP = 8192
"""Most tokens of a step."""
console = Console(width=150, highlight=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as the command line says; the exit code.

    Raises:
        ConfigError: no GPU for generated weights, or a case that is none.
        AnswerError: a server answered otherwise than it was asked.
    """
    options = _parser().parse_args(arguments)
    loads = [load_of(text, options) for text in options.cases]
    options.layouts = [Layout.of(text) for text in options.layouts]
    stop = time.monotonic() + options.seconds
    origin = provenance()
    cases: list[dict[str, Any]] = []
    with checkpoint(options.checkpoint, options.shape) as folder:
        write_tokenizer(folder)
        vocabulary = text_tokens(folder)
        loads = [replace(load, vocabulary=vocabulary) for load in loads]
        routes = {load.route for load in loads}
        with _servers(folder, routes, options) as servers, Clients(options.clients) as clients:
            for load in loads:
                if time.monotonic() > stop:
                    console.print(f"no time left for {_name(load)}")
                    continue
                cases += _measure(servers, clients, load, options)
                _compare(cases)
                write_cases(options.out, origin, cases)
    _print(cases)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandLine("http", __doc__)
    parser.add_choice("--shape", SHAPES, "Qwen3-8B", "of the model", nargs=None)
    parser.add_choice("--variants", VARIANTS, list(VARIANTS), "servers, in turn")
    parser.add_argument(
        "--cases",
        nargs="+",
        metavar="REQUESTS[:ROUTE][:logprobs=N][:streamed][:n]",
        default=["128", "128:logprobs=0", "128:logprobs=0:n", "128:logprobs=0:streamed"],
        help=f"what is asked; routes: {', '.join(ROUTES)}",
    )
    parser.add_argument("--samples-per-prompt", type=int, default=8, help="answers to each prompt")
    parser.add_argument("--input", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=1024, help="tokens of an answer")
    parser.add_argument("--repeat", type=int, default=3, help="turns of each server in a case")
    parser.add_argument("--clients", type=int, default=4, help="processes that ask")
    parser.add_argument("--kv", default="auto", help="dtype of the KV cache")
    parser.add_argument("--kv-gib", type=float, default=22, help="of each server's KV cache")
    parser.add_argument("--seqs", type=int, default=256, help="most requests of a step")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after so long")
    parser.add_argument(
        "--layouts", nargs="+", default=["one"], help="of each variant over GPUs, as many servers"
    )
    parser.add_argument(
        "--settings",
        nargs="+",
        type=json_object,
        default=[{}],
        metavar="JSON",
        help="of blockfp8: as many servers",
    )
    parser.add_argument("--serve", nargs="*", default=[], help="more options of all servers, without dashes")
    parser.add_argument("--checkpoint", type=Path, help="serve this one, or keep the generated weights here")
    return parser


def load_of(text: str, options: Any) -> HttpLoad:
    """Return the load that a case of --cases names."""
    first, *words = text.split(":")
    route = next((word for word in words if word in ROUTES), "completions")
    logprobs = next((word[9:] for word in words if word.startswith("logprobs=")), None)
    unknown = {word for word in words if not word.startswith("logprobs=")} - {*ROUTES, "streamed", "n"}
    if not first.isdigit() or unknown or (logprobs and not logprobs.isdigit()):
        raise ConfigError(f"--cases: expected such as 128:chat:logprobs=0:streamed:n, found {text!r}")
    return HttpLoad(
        requests=int(first),
        samples=min(options.samples_per_prompt, int(first)),
        tokens=options.input,
        output=options.output,
        route=route,
        logprobs=None if logprobs is None else int(logprobs),
        streamed="streamed" in words,
        one_request="n" in words,
    )


def _name(load: HttpLoad) -> str:
    words = [str(load.requests), load.route]
    words += [] if load.logprobs is None else [f"logprobs={load.logprobs}"]
    words += ["streamed"] if load.streamed else []
    words += [f"n={load.samples}"] if load.one_request else []
    return " ".join(words)


def _servers(
    folder: Path, routes: Collection[str], options: Any
) -> AbstractContextManager[dict[tuple[str, Layout], list[Server]]]:
    """Start all servers, by name and layout; they answer these routes inside the context."""
    arguments = [
        *("--max-model-len", str(options.input * 2 + options.output + 64)),
        *("--max-num-seqs", str(options.seqs), "--max-num-batched-tokens", str(STEP)),
        *serve_options(options.serve),
        *(["--enable-scale-out"] if "generate" in routes else []),
    ]
    return variant_servers(
        folder,
        options.variants,
        arguments,
        kv=options.kv,
        kv_gib=options.kv_gib,
        console=console,
        settings=options.settings,
        layouts=options.layouts,
    )


def _measure(
    servers: dict[tuple[str, Layout], list[Server]], clients: Clients, load: HttpLoad, options: Any
) -> list[dict[str, Any]]:
    seeds = itertools.count(hash((load.requests, load.streamed)) % 1000)
    short = replace(load, output=min(load.output, 48))
    urls = {name: [server.url for server in group] for name, group in servers.items()}
    for own in urls.values():
        clients.ask(own, short, next(seeds), 300)
    samples: dict[tuple[str, Layout], list[float]] = {name: [] for name in servers}
    gaps: dict[tuple[str, Layout], list[float]] = {name: [] for name in servers}
    parts: dict[tuple[str, Layout], int] = dict.fromkeys(servers, 0)
    for _ in range(options.repeat):
        for name, own in urls.items():
            answered = clients.ask(own, load, next(seeds), 300)
            samples[name].append(answered.tokens / answered.seconds)
            gaps[name] += answered.gaps
            parts[name] += answered.parts
            words = f"{name[0]} {name[1]}"
            console.print(f"{_name(load):48} {words:40} {samples[name][-1]:9,.0f} tokens/s")
    return [
        {
            "model": options.shape,
            "kv": options.kv,
            "requests": load.requests,
            "samples_per_prompt": load.samples,
            "one_request": load.one_request,
            "input": load.tokens,
            "output": load.output,
            "route": load.route,
            "logprobs": load.logprobs,
            "streamed": load.streamed,
            "variant": name[0],
            **name[1].facts(),
            "tokens_per_s": round(statistics.median(samples[name]), 1),
            "samples": [round(sample, 1) for sample in samples[name]],
            "itl_p50": _quantile(gaps[name], 50),
            "itl_p99": _quantile(gaps[name], 99),
            "tokens_per_part": round(load.requests * load.output * options.repeat / parts[name], 2)
            if load.streamed
            else None,
        }
        for name in servers
    ]


def _quantile(gaps: list[float], percent: int) -> float | None:
    if len(gaps) < 2:
        return None
    return round(statistics.quantiles(gaps, n=100, method="inclusive")[percent - 1], 5)


def _compare(cases: list[dict[str, Any]]) -> None:
    """Set each case's ratios to BF16, and to the same server without logprobs and streams."""
    shape = ("requests", "samples_per_prompt", "input", "output", "layout")
    compared = (*shape, "route", "logprobs", "streamed", "one_request")
    for case in cases:
        for other in cases:
            same = [case.get(key) == other.get(key) for key in compared]
            if all(same) and other["variant"] == "bf16":
                case["ratio_bf16"] = round(case["tokens_per_s"] / other["tokens_per_s"], 3)
            plain = other["logprobs"] is None and not other["streamed"] and not other["one_request"]
            alike = all(case.get(key) == other.get(key) for key in (*shape, "variant"))
            if plain and alike and other["route"] == "completions":
                case["ratio_without_logprobs"] = round(case["tokens_per_s"] / other["tokens_per_s"], 3)


def _print(cases: list[dict[str, Any]]) -> None:
    for case in cases:
        words = [str(case["requests"]), case["route"], f"logprobs={case['logprobs']}"]
        words += ["streamed"] if case["streamed"] else []
        words += ["n"] if case["one_request"] else []
        itl = f"p50 {case['itl_p50'] * 1e3:.1f} p99 {case['itl_p99'] * 1e3:.1f} ms" if case["itl_p50"] else ""
        console.print(
            f"{' '.join(words):44} {case['variant'][:50]:50} {case.get('layout', 'one'):10} {case['tokens_per_s']:8,.0f} "
            f"{case.get('ratio_bf16', 0):5.2f} {case.get('ratio_without_logprobs', 0):5.2f} "
            f"{case['tokens_per_part'] or '':>5} {itl}"
        )
