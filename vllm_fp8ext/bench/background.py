# SPDX-License-Identifier: Apache-2.0
"""Requests that run beside a measurement, in a process of their own: what is measured holds up none of their clocks.

They are the same at all times, so that rates can be compared: each has a prompt of its own, which no cache holds, of
`PROMPT_TOKENS`, and an answer of `ANSWER_TOKENS`; the next one follows when it ends; and the first ones begin in the middle,
with a prompt that is longer by what they have behind them. So at any time contexts are spread evenly over all lengths, and
requests end and begin at even intervals.
"""

import bisect
import contextlib
import itertools
import multiprocessing
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from multiprocessing.connection import Connection
from typing import Any, Self

import httpx

from vllm_fp8ext.demo.server import MODEL

PROMPT_TOKENS, ANSWER_TOKENS = 512, 1024
RATE_SECONDS = 10.0
"""For the rates of tokens before and after what is measured: about what an answer takes with many requests."""
SETTLE_SECONDS = 5.0
"""Until what was measured is over."""
STEADY = 0.1
"""Largest relative difference between the rates of two halves of `RATE_SECONDS` in a steady state."""
PATIENCE_SECONDS = 90.0
"""For a server that compiles kernels first."""


class Background:
    """So many requests at once, until the end of the context."""

    def __init__(self, url: str, running: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._end, there = context.Pipe()
        self._process = context.Process(target=_run, args=(url, running, there), daemon=True)

    def __enter__(self) -> Self:
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self._end.send(None)
        self._process.join(60)
        self._process.kill()

    def settle(self, *, rested: bool = False) -> None:
        """Until tokens come steadily; their rate over the last seconds is the one before. `rested`: nothing else was done in
        the last seconds, as when `during` has just told the rate after something."""
        self._ask("settle", rested=rested)

    def during(self, begin: float, end: float) -> dict[str, Any]:
        """Return rates around two times of the monotonic clock, and one stream's longest gap."""
        rates: dict[str, Any] = self._ask("during", begin, end)
        return rates

    def _ask(self, what: str, *arguments: float, **options: bool) -> Any:
        self._end.send((what, arguments, options))
        answer = self._end.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


def _run(url: str, running: int, end: Connection) -> None:
    with _Load(url, running) as load:
        while (question := end.recv()) is not None:
            what, arguments, options = question
            try:
                end.send(getattr(load, what)(*arguments, **options))
            except Exception as error:
                end.send(RuntimeError(f"the requests beside: {type(error).__name__}: {error}"))


class _Load:
    """Requests that always run, one stream to watch, and the server's count of tokens."""

    def __init__(self, url: str, running: int) -> None:
        self._url = url
        self._running = running
        self._stop = threading.Event()
        self._streams: list[list[float]] = []
        self._counts: list[tuple[float, float]] = []
        self._steady = False

    def __enter__(self) -> Self:
        self._pool = ThreadPoolExecutor(self._running + 1)
        self._work = [self._pool.submit(self._count), self._pool.submit(self._ask, 0, self._watch)]
        self._work += [self._pool.submit(self._ask, slot, self._complete) for slot in range(1, self._running)]
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown()

    def settle(self, *, rested: bool = False) -> None:
        """Until tokens come steadily; their rate over the last seconds is the one before the updates."""
        until = time.monotonic() + PATIENCE_SECONDS
        self._steady = False
        wait = 0.0 if rested else RATE_SECONDS
        while not self._steady and time.monotonic() < until:
            self._wait(wait)
            wait, now = RATE_SECONDS, time.monotonic()
            middle = now - RATE_SECONDS / 2
            rates = self._rate(now - RATE_SECONDS, middle), self._rate(middle, now)
            self._steady = min(rates) > (1 - STEADY) * max(rates)

    def _wait(self, seconds: float) -> None:
        """Raises what went wrong with a request."""
        for failed in wait(self._work, seconds, FIRST_COMPLETED).done:
            failed.result()

    def during(self, begin: float, end: float) -> dict[str, Any]:
        """Return rates around updates from `begin` to `end`, and the watched stream's longest gap."""
        self._wait(SETTLE_SECONDS + RATE_SECONDS)
        rates = {
            "tokens_per_s_before": self._rate(begin - RATE_SECONDS, begin),
            "tokens_per_s_during": self._rate(begin, end),
            "tokens_per_s_after": self._rate(end + SETTLE_SECONDS, end + SETTLE_SECONDS + RATE_SECONDS),
        }
        usually = (rates["tokens_per_s_before"] + rates["tokens_per_s_after"]) / 2
        lost = 1 - rates["tokens_per_s_during"] / usually
        stall, usual = self._longest_gap(begin - 1, end + 1), self._longest_gap(begin - RATE_SECONDS, begin)
        gaps = {"stall_seconds": stall, "longest_gap_before": usual}
        return {**rates, **gaps, "tokens_lost": lost, "steady_before": self._steady}

    def _longest_gap(self, begin: float, end: float) -> float | None:
        """Between two tokens of one stream."""
        inside = ([when for when in times if begin < when < end] for times in list(self._streams))
        return max(
            (after - before for times in inside for before, after in itertools.pairwise(times)), default=None
        )

    def _rate(self, begin: float, end: float) -> float:
        return (self._tokens(end) - self._tokens(begin)) / (end - begin)

    def _tokens(self, when: float) -> float:
        """Tokens until then, between two counts in proportion to the time."""
        after = min(max(1, bisect.bisect(self._counts, (when, 0.0))), len(self._counts) - 1)
        (first, before_count), (last, after_count) = self._counts[after - 1 : after + 1]
        return before_count + (after_count - before_count) * (when - first) / (last - first)

    def _count(self) -> None:
        with httpx.Client(base_url=self._url, timeout=600, trust_env=False) as client:
            while not self._stop.wait(0.1):
                tokens = generated_tokens(client)
                self._counts.append((time.monotonic(), tokens))

    def _ask(self, slot: int, answered: Callable[[httpx.Client, dict[str, Any]], None]) -> None:
        """One request after the other; of the first a part is over already, for each slot another one."""
        over = ANSWER_TOKENS * slot // self._running
        with httpx.Client(timeout=600, trust_env=False) as client:
            for turn in itertools.count():
                if self._stop.is_set():
                    return
                answered(client, _body(PROMPT_TOKENS + over, ANSWER_TOKENS - over, seed=(slot, turn)))
                over = 0

    def _complete(self, client: httpx.Client, body: dict[str, Any]) -> None:
        client.post(f"{self._url}/v1/completions", json=body).raise_for_status()

    def _watch(self, client: httpx.Client, body: dict[str, Any]) -> None:
        times: list[float] = []
        self._streams.append(times)
        with client.stream("POST", f"{self._url}/v1/completions", json=body | {"stream": True}) as reply:
            reply.raise_for_status()
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    times.append(time.monotonic())
                if self._stop.is_set():
                    break


def generated_tokens(client: httpx.Client) -> float:
    """How many tokens a server has sampled since its start, by its metrics."""
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total"))


def _body(prompt_tokens: int, answer_tokens: int, seed: tuple[int, int]) -> dict[str, Any]:
    tokens = random.Random(str(seed)).choices(range(7, 507), k=prompt_tokens)
    return {
        "model": MODEL,
        "prompt": tokens,
        "max_tokens": answer_tokens,
        "ignore_eos": True,
        "temperature": 1.0,
    }
