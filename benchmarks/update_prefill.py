# SPDX-License-Identifier: Apache-2.0
"""Measure what updates without a break cost long prompts and the streams beside them.

    python benchmarks/update_prefill.py --shape Qwen3-8B --prompts 8192 32768 --running 64 --out prefill.json

Beside requests that are the same at all times, --users ask for one token after a prompt of so many tokens, one request after
the other; first without updates, then beside updates that follow each other without a break (by CUDA IPC on a GPU, else from
files). A prompt that meets a commit begins again, twice at most. For each length it is told how long the first token takes,
how many tokens of prompts a second are answered, what part of the computed ones was computed again (`prefill_lost`), how many
answers name several weights, and the longest gap in one of the streams beside. Rates before and after are of these streams
alone, so that what updates cost is the difference between two windows.
"""

import argparse
import contextlib
import itertools
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import torch
from rich.console import Console

from vllm_fp8ext.bench.background import Background
from vllm_fp8ext.bench.provenance import provenance, write_cases
from vllm_fp8ext.bench.servers import add_update_options, updated_server
from vllm_fp8ext.demo.server import MODEL
from vllm_fp8ext.serve.client import Client
from vllm_fp8ext.serve.client.flat import in_buffers
from vllm_fp8ext.update.transports.wire import stored

COUNTED = ("fp8ext:restarted_prompts_total", "fp8ext:restarted_prompt_tokens_total")
LOOK_SECONDS = 6.0
"""Until metrics tell of what was done: the server looks every five seconds."""
console = Console(width=140, highlight=False)


def main() -> int:
    options = _options()
    origin, cases = provenance(), []
    longest = max(4096, max(options.prompts) + 64)
    requests = options.running + options.users
    with (
        updated_server(options, requests, longest=longest) as (server, checkpoints),
        server.client() as client,
        contextlib.ExitStack() as stack,
    ):
        update = _updates(client, checkpoints)
        load = stack.enter_context(Background(server.url, options.running)) if options.running else None
        for tokens, updated in itertools.product(options.prompts, (False, True)):
            window = _window(server.url, options, tokens, load, update if updated else None)
            case = {"model": options.shape, "load": options.running, "users": options.users}
            cases.append({**case, "prompt_tokens": tokens, "updated": updated, **window})
            console.print({name: value for name, value in cases[-1].items() if name != "first_token"})
            write_cases(options.out, origin, cases)
    return 0


def _updates(client: Client, checkpoints: list[Path]) -> Callable[[], float]:
    """Return a function that changes the weights back and forth and returns the pause in seconds."""
    turns = itertools.cycle(checkpoints[::-1])
    if not torch.cuda.is_available():
        return lambda: client.load(next(turns)).seconds["pause"]
    held = {path: dict(in_buffers(stored(path, "cuda"))) for path in checkpoints}
    return lambda: client.push(held[next(turns)], transport="ipc").seconds["pause"]


def _window(
    url: str, options: Any, tokens: int, load: Background | None, update: Callable[[], float] | None
) -> dict[str, Any]:
    """Prompts of so many tokens for a while, and what became of them and of the streams beside."""
    stop, answers, pauses = threading.Event(), [], []
    with ThreadPoolExecutor(options.users) as pool:
        if load:
            load.settle()
        users = [pool.submit(_user, url, tokens, user, stop, answers) for user in range(options.users)]
        while not answers and not any(user.done() for user in users):
            time.sleep(0.05)
        before, begin, first = _counted(url), time.monotonic(), len(answers)
        while time.monotonic() < begin + options.seconds:
            if update:
                pauses.append(update())
            else:
                time.sleep(0.1)
        end = time.monotonic()
        beside = load.during(begin, end) if load else {}
        stop.set()
        for user in users:
            user.result()
    time.sleep(LOOK_SECONDS)
    prompts, again = (after - early for after, early in zip(_counted(url), before, strict=True))
    mine = [answer for answer in answers[first:] if begin < answer["at"] <= end]
    seconds = sorted(answer["seconds"] for answer in mine)
    answered = tokens * len(mine)
    return {
        "updates": len(pauses),
        "pause_seconds": max(pauses, default=None),
        "answers": len(mine),
        "first_token_median": statistics.median(seconds) if seconds else None,
        "first_token_longest": seconds[-1] if seconds else None,
        "prompt_tokens_per_s": answered / (end - begin),
        "restarted_prompts": prompts,
        "restarted_tokens": again,
        "prefill_lost": again / (again + answered) if answered else None,
        "of_several_weights": sum(answer["weights"] > 1 for answer in mine),
        **beside,
        "first_token": seconds,
    }


def _user(url: str, tokens: int, user: int, stop: threading.Event, answers: list[dict[str, Any]]) -> None:
    """One prompt after the other, of which no cache holds anything."""
    with httpx.Client(timeout=600, trust_env=False) as client:
        for turn in itertools.count():
            if stop.is_set():
                return
            prompt = random.Random(f"{tokens} {user} {turn}").choices(range(7, 507), k=tokens)
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "ignore_eos": True, "stream": True}
            sent = time.monotonic()
            with client.stream("POST", f"{url}/v1/completions", json=body) as reply:
                reply.raise_for_status()
                choices = [choice for part in _parts(reply) for choice in part.get("choices", ())]
            at = time.monotonic()
            weights = sum(len(choice.get("weight_versions") or ()) for choice in choices)
            answers.append({"at": at, "seconds": at - sent, "weights": weights})


def _parts(reply: httpx.Response) -> Iterator[dict[str, Any]]:
    return (json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {"))


def _counted(url: str) -> list[float]:
    """Prompts that began again since the server started, and their tokens."""
    lines = httpx.get(f"{url}/metrics", timeout=60, trust_env=False).text.splitlines()
    return [sum(float(line.split()[-1]) for line in lines if line.startswith(name)) for name in COUNTED]


def _options() -> Any:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_update_options(parser)
    parser.add_argument("--prompts", type=int, nargs="+", default=[8192, 32768], help="their tokens, in turn")
    parser.add_argument("--users", type=int, default=2, help="who ask for long prompts at once")
    parser.add_argument("--running", type=int, default=64, help="requests beside them")
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="of each length, without updates and beside them"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
