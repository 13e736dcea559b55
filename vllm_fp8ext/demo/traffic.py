# SPDX-License-Identifier: Apache-2.0
"""The demo's users: they ask through the `openai` client, and watch when tokens arrive."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from openai import AsyncOpenAI

from vllm_fp8ext.checkpoints import Problem
from vllm_fp8ext.demo.server import MODEL

_CONCURRENCY = 32


@dataclass
class Stream:
    """One streamed completion: when each event with text came, and which weights sampled its tokens."""

    arrivals: list[float] = field(default_factory=list)
    text: str = ""
    weight_versions: list[dict[str, Any]] = field(default_factory=list)

    @property
    def longest_gap(self) -> float:
        """Longest time between two events, in seconds."""
        return max((b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)), default=0.0)


def answers(url: str, problems: Sequence[Problem]) -> list[str]:
    """The server's greedy answers, many requests at a time."""

    async def ask_all() -> list[str]:
        gate = asyncio.Semaphore(_CONCURRENCY)
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:

            async def ask(problem: Problem) -> str:
                async with gate:
                    reply = await client.completions.create(
                        model=MODEL, prompt=problem.prompt, max_tokens=8, temperature=0
                    )
                    return reply.choices[0].text.strip()

            return await asyncio.gather(*(ask(problem) for problem in problems))

    return asyncio.run(ask_all())


def accuracy(found: Sequence[str], problems: Sequence[Problem]) -> float:
    """Share of right answers."""
    return sum(text == problem.answer for text, problem in zip(found, problems, strict=True)) / len(problems)


async def stream(client: AsyncOpenAI, prompt: str, tokens: int, first: asyncio.Event | None = None) -> Stream:
    """Stream `tokens` tokens of a completion; `first` is set when they begin to arrive."""
    seen = Stream()
    events = await client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=tokens, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    async for event in events:
        if first and len(seen.arrivals) >= 3:
            first.set()
        for choice in event.choices:
            seen.arrivals.append(time.perf_counter())
            seen.text += choice.text
            seen.weight_versions += getattr(choice, "weight_versions", None) or []
    return seen
