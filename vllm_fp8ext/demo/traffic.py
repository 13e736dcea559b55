# SPDX-License-Identifier: Apache-2.0
"""The demo's users: they ask through the `openai` client, and watch when tokens arrive."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

from openai import AsyncOpenAI

from vllm_fp8ext.checkpoints import AdditionProblem
from vllm_fp8ext.demo.server import MODEL

_CONCURRENCY = 32

T = TypeVar("T")


@dataclass
class Completion:
    """One completion: which weights sampled its tokens and, when it was streamed, when each event came."""

    arrivals: list[float] = field(default_factory=list)
    text: str = ""
    weight_versions: list[dict[str, Any]] = field(default_factory=list)

    @property
    def straddles(self) -> bool:
        """Return whether more than one set of weights sampled its tokens."""
        return len(self.weight_versions) > 1

    def longest_gap(self, start: float, stop: float) -> float:
        """Longest time without an event that overlaps this span of time, in seconds."""
        gaps = [b - a for a, b in pairwise(self.arrivals) if b >= start and a <= stop]
        return max(gaps, default=0.0)


def answers(url: str, problems: Sequence[AdditionProblem]) -> list[str]:
    """The server's greedy answers, many requests at a time."""

    async def ask_all() -> list[str]:
        gate = asyncio.Semaphore(_CONCURRENCY)
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:

            async def ask(problem: AdditionProblem) -> str:
                async with gate:
                    reply = await client.completions.create(
                        model=MODEL, prompt=problem.prompt, max_tokens=8, temperature=0
                    )
                    return reply.choices[0].text.strip()

            return await asyncio.gather(*(ask(problem) for problem in problems))

    return asyncio.run(ask_all())


def accuracy(texts: Sequence[str], problems: Sequence[AdditionProblem]) -> float:
    """Share of right answers."""
    return sum(text == problem.answer for text, problem in zip(texts, problems, strict=True)) / len(problems)


async def traffic(
    client: AsyncOpenAI,
    prompts: Sequence[str],
    tokens: int,
    during: Callable[[], Awaitable[T]],
    *,
    streamed: int,
) -> tuple[T, list[Completion]]:
    """Keep one request per prompt running while `during` is awaited; each begins again when it ends.

    The first asks for `tokens` tokens, the others for fewer. The first `streamed` of them are streamed; the others come
    whole, which keeps the client's own work from slowing the server down. Returns what `during` gave and all completions,
    those included that were running when it ended.
    """
    ended = asyncio.Event()
    begun = asyncio.Semaphore(0)
    completions: list[Completion] = []

    # of different lengths: requests that all end at once would leave gaps, and the commit would find the server idle
    lengths = [tokens - number * tokens // (2 * len(prompts)) for number in range(len(prompts))]

    async def keep_asking(prompt: str, ask: Callable[..., Awaitable[None]], length: int) -> None:
        while not ended.is_set():
            seen = Completion()
            completions.append(seen)
            await ask(client, prompt, length, seen, begun)

    workers = [
        asyncio.create_task(keep_asking(prompt, _stream if number < streamed else _whole, lengths[number]))
        for number, prompt in enumerate(prompts)
    ]
    try:
        for _ in workers:
            await begun.acquire()
        result = await during()
    finally:
        ended.set()
        await asyncio.gather(*workers)
    return result, completions


async def _stream(
    client: AsyncOpenAI, prompt: str, tokens: int, seen: Completion, begun: asyncio.Semaphore
) -> None:
    events = await client.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    async for event in events:
        for choice in event.choices:
            if not seen.arrivals:
                begun.release()
            seen.arrivals.append(time.perf_counter())
            seen.text += choice.text
            seen.weight_versions += getattr(choice, "weight_versions", None) or []


async def _whole(
    client: AsyncOpenAI, prompt: str, tokens: int, seen: Completion, begun: asyncio.Semaphore
) -> None:
    begun.release()
    reply = await client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=tokens, temperature=0, extra_body={"ignore_eos": True}
    )
    seen.text = reply.choices[0].text
    seen.weight_versions = reply.choices[0].weight_versions
