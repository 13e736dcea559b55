# SPDX-License-Identifier: Apache-2.0
"""Long requests over HTTP: what logprobs cost at late positions, the API server's memory, and how exact logprobs are.

    python benchmarks/long_requests.py --shape Qwen3-1.7B --kv fp8 --requests 64 --prompt 8192 --output 16384 --out long.json

`rate` cases: --requests answers of --window tokens, without and with logprobs, streamed and not, after prompts of each length
of --positions; the servers take turns, --repeat times. `memory` cases: as many answers of --output tokens after prompts of
--prompt, with logprobs, and by how much the process that answers grows for each of them. `agreement` cases: the logprobs of
these answers, which decoding computed, beside `prompt_logprobs` of the same tokens, which prefill computes, by position.
Weights are generated, and answers sampled at temperature 1.
"""

import argparse
import asyncio
import itertools
import json
import random
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_fp8ext.bench.engines import VARIANTS
from vllm_fp8ext.bench.generated import SHAPES, checkpoint
from vllm_fp8ext.bench.http_client import AnswerError, Clients, HttpLoad
from vllm_fp8ext.bench.layouts import Layout
from vllm_fp8ext.bench.provenance import provenance, write_cases
from vllm_fp8ext.bench.servers import variant_servers
from vllm_fp8ext.demo.server import MODEL, Server, serve_options

LONGEST_SECONDS = 1800.0
"""For one load."""
PER_PROMPT = 8
"""Answers to each prompt."""
console = Console(width=140, highlight=False)


def main() -> int:
    options = _options()
    origin, cases = provenance(), []
    with (
        checkpoint(options.checkpoint, options.shape) as folder,
        _servers(folder, options) as started,
        Clients(options.clients) as clients,
    ):
        vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
        servers = {name: server for (name, _), [server] in started.items()}
        for case in itertools.chain(
            _rates(servers, clients, vocabulary, options), _memory_and_agreement(servers, vocabulary, options)
        ):
            cases.append({"model": options.shape, "kv": options.kv, "requests": options.requests, **case})
            console.print(cases[-1])
            write_cases(options.out, origin, cases)
    return 0


def _servers(folder: Path, options: Any) -> AbstractContextManager[dict[tuple[str, Layout], list[Server]]]:
    """Start all servers, by variant; they answer inside the context."""
    arguments = [
        *("--max-model-len", str(max(options.prompt + options.output, *options.positions) + options.window)),
        *("--max-num-seqs", str(options.requests), "--max-num-batched-tokens", "8192"),
        *serve_options(options.serve),
    ]
    return variant_servers(
        folder, options.variants, arguments, kv=options.kv, kv_gib=options.kv_gib, console=console
    )


def _rates(
    servers: dict[str, Server], clients: Clients, vocabulary: int, options: Any
) -> Iterator[dict[str, Any]]:
    asked = ((None, False), (0, False), (0, True))
    for position in options.positions:
        load = HttpLoad(
            requests=options.requests,
            samples=PER_PROMPT,
            tokens=position,
            output=options.window,
            vocabulary=vocabulary,
        )
        seeds = itertools.count(position)
        samples: dict[tuple[str, Any, bool], list[float]] = {}
        for _ in range(options.repeat):
            for logprobs, streamed in asked:
                for name, server in servers.items():
                    one = replace(load, logprobs=logprobs, streamed=streamed)
                    seconds = _decode_seconds(server.url, one, clients, next(seeds))
                    rate = options.requests * (options.window - 1) / seconds
                    samples.setdefault((name, logprobs, streamed), []).append(rate)
        for (name, logprobs, streamed), rates in samples.items():
            plain = statistics.median(samples[name, None, False])
            yield {
                "case": "rate",
                "variant": name,
                "position": position,
                "logprobs": logprobs,
                "streamed": streamed,
                "tokens_per_s": round(statistics.median(rates), 1),
                "samples": [round(rate, 1) for rate in rates],
                "ratio_without_logprobs": round(statistics.median(rates) / plain, 3),
            }


def _decode_seconds(url: str, load: HttpLoad, clients: Clients, seed: int) -> float:
    """Time answers whose prompts are cached: the same load is asked for one token each before."""
    clients.ask([url], replace(load, output=1, streamed=False), seed, LONGEST_SECONDS)
    return clients.ask([url], load, seed, LONGEST_SECONDS).seconds


def _memory_and_agreement(
    servers: dict[str, Server], vocabulary: int, options: Any
) -> Iterator[dict[str, Any]]:
    for name, server in servers.items():
        pid, peak, done = server.process.pid, [_resident(server.process.pid)], threading.Event()
        before = peak[0]
        watch = threading.Thread(target=_watch, args=(pid, peak, done))
        watch.start()
        try:
            started = time.monotonic()
            prompts, answers = asyncio.run(_ask_all(server.url, vocabulary, options))
            seconds = time.monotonic() - started
        finally:
            done.set()
            watch.join()
        yield {
            "case": "memory",
            "variant": name,
            "prompt": options.prompt,
            "output": options.output,
            "tokens_per_s": round(options.requests * options.output / seconds, 1),
            "api_process_before": before,
            "api_process_peak": peak[0],
            "bytes_per_request": (peak[0] - before) // options.requests,
            "bytes_per_token": round((peak[0] - before) / (options.requests * options.output), 1),
        }
        yield from _agreement(name, server.url, prompts, answers, options)


def _agreement(
    name: str, url: str, prompts: list[list[int]], answers: list[tuple[list[int], list[float]]], options: Any
) -> Iterator[dict[str, Any]]:
    """Differences of logprobs by position, of --compared answers."""
    differences: dict[int, list[float]] = {}
    for prompt, (tokens, decoded) in list(zip(prompts, answers, strict=True))[: options.compared]:
        again = asyncio.run(_prompt_logprobs(url, prompt + tokens))[len(prompt) :]
        for position, (one, other) in enumerate(zip(decoded, again, strict=True)):
            differences.setdefault(position.bit_length(), []).append(abs(one - other))
    for bits, of_range in sorted(differences.items()):
        yield {
            "case": "agreement",
            "variant": name,
            "positions": [1 << bits >> 1, (1 << bits) - 1],
            "tokens": len(of_range),
            "mean": sum(of_range) / len(of_range),
            "p99": sorted(of_range)[int(0.99 * (len(of_range) - 1))],
            "largest": max(of_range),
        }


async def _ask_all(
    url: str, vocabulary: int, options: Any
) -> tuple[list[list[int]], list[tuple[list[int], list[float]]]]:
    """Each request's prompt, its tokens and their logprobs."""
    import aiohttp

    draw = random.Random(options.prompt)
    few = [
        draw.choices(range(vocabulary), k=options.prompt) for _ in range(-(-options.requests // PER_PROMPT))
    ]
    prompts = [few[index // PER_PROMPT] for index in range(options.requests)]
    timeout = aiohttp.ClientTimeout(total=LONGEST_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        found = await asyncio.gather(
            *(_complete(session, url, prompt, max_tokens=options.output, logprobs=0) for prompt in prompts)
        )
    return prompts, [(choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in found]


async def _prompt_logprobs(url: str, tokens: list[int]) -> list[float]:
    """Return the logprob of each token after those before it; the first has none, and gets 0."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=LONGEST_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        choice = await _complete(session, url, tokens, max_tokens=1, prompt_logprobs=0)
    logprobs = zip(tokens[1:], choice["prompt_logprobs"][1:], strict=True)
    return [0.0, *(of_token[str(token)]["logprob"] for token, of_token in logprobs)]


async def _complete(session: Any, url: str, prompt: list[int], **asked: Any) -> dict[str, Any]:
    body = {
        "model": MODEL,
        "prompt": prompt,
        "temperature": 1.0,
        "ignore_eos": True,
        "return_token_ids": True,
        **asked,
    }
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise AnswerError(f"{url}: {response.status} {(await response.text())[:500]}")
        choice: dict[str, Any] = (await response.json())["choices"][0]
        return choice


def _watch(pid: int, peak: list[int], done: threading.Event) -> None:
    while not done.wait(0.2):
        peak[0] = max(peak[0], _resident(pid))


def _resident(pid: int) -> int:
    """Bytes of memory that a process has."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


def _options() -> Any:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="Qwen3-1.7B", help="of the model")
    parser.add_argument("--checkpoint", type=Path, help="serve this one, or keep the generated weights here")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["blockfp8"], help="servers")
    parser.add_argument("--kv", default="fp8", help="dtype of the KV cache")
    parser.add_argument("--kv-gib", type=float, default=64, help="of each server's KV cache")
    parser.add_argument("--requests", type=int, default=64, help="answers at once")
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of a prompt of long answers")
    parser.add_argument("--output", type=int, default=16384, help="tokens of a long answer")
    parser.add_argument(
        "--positions", type=int, nargs="*", default=[8192, 16384, 23552], help="prompts of rates"
    )
    parser.add_argument("--window", type=int, default=512, help="tokens of answers of rates")
    parser.add_argument("--repeat", type=int, default=3, help="of rates")
    parser.add_argument("--compared", type=int, default=4, help="long answers whose logprobs are compared")
    parser.add_argument("--clients", type=int, default=4, help="processes that ask for rates")
    parser.add_argument("--serve", nargs="*", default=[], help="more options of all servers, without dashes")
    parser.add_argument("--out", type=Path, help="write the cases here, as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
