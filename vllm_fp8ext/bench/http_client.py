# SPDX-License-Identifier: Apache-2.0
"""Asks an OpenAI-compatible server as a trainer does, from several processes, and times what comes."""

import asyncio
import json
import multiprocessing
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.pool import Pool
from typing import Any, Self

from vllm_fp8ext.errors import Fp8ExtError

ROUTES = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "generate": "/inference/v1/generate",
}
"""Routes that answer requests, by name."""


class AnswerError(Fp8ExtError):
    """A server answered otherwise than it was asked."""


@dataclass(frozen=True, kw_only=True)
class HttpLoad:
    """Requests that are sent at once, each of which is answered in full.

    Sampled at temperature 1, without an end before `output` tokens, with the ids of tokens in the answers.
    """

    requests: int
    """Answers: those of one prompt are as many requests, or one with `n`."""
    samples: int
    """Answers to each prompt."""
    tokens: int
    """Length of a prompt, which is drawn at random."""
    output: int
    """Tokens of an answer."""
    route: str = "completions"
    logprobs: int | None = None
    streamed: bool = False
    one_request: bool = False
    """All samples of a prompt are one request."""
    vocabulary: int = 0
    """Ids of prompts are below."""

    def bodies(self, seed: int) -> list[dict[str, Any]]:
        """The bodies of all requests."""
        draw = random.Random(seed)
        bodies = []
        for _ in range(-(-self.requests // self.samples)):
            prompt = [draw.randrange(self.vocabulary) for _ in range(self.tokens)]
            copies = 1 if self.one_request else self.samples
            bodies += [self._body(prompt) for _ in range(copies)]
        return bodies if self.one_request else bodies[: self.requests]

    def _body(self, prompt: list[int]) -> dict[str, Any]:
        sampling = {"temperature": 1.0, "max_tokens": self.output, "ignore_eos": True}
        if self.one_request:
            sampling["n"] = self.samples
        if self.route == "generate":
            if self.logprobs is not None:
                sampling["logprobs"] = self.logprobs
            return {"token_ids": prompt, "sampling_params": sampling, "stream": self.streamed}
        body = {"model": "model", **sampling, "stream": self.streamed, "return_token_ids": True}
        if self.route == "chat":
            text = "".join(chr(ord("a") + token % 26) for token in prompt)  # a token each
            body["messages"] = [{"role": "user", "content": text}]
            if self.logprobs is not None:
                body |= {"logprobs": True, "top_logprobs": self.logprobs}
        else:
            body["prompt"] = prompt
            if self.logprobs is not None:
                body["logprobs"] = self.logprobs
        return body


@dataclass(frozen=True, kw_only=True)
class Answered:
    """Answers to a load."""

    tokens: int
    seconds: float
    gaps: Sequence[float]
    """Seconds between two parts of a stream that brought tokens."""
    parts: int
    """Parts of streams that brought tokens."""


class Clients:
    """Processes that ask servers."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._pool: Pool = multiprocessing.get_context("spawn").Pool(processes)
        self._pool.map(_ready, range(processes))

    def ask(self, urls: Sequence[str], load: HttpLoad, seed: int, longest: float) -> Answered:
        """Send a load, spread over the processes and the servers, and wait for its answers.

        Raises:
            AnswerError: an answer is no success, is not of the length asked for, or took `longest` seconds.
        """
        bodies = load.bodies(seed)
        asked = [(urls[index % len(urls)] + ROUTES[load.route], body) for index, body in enumerate(bodies)]
        shares = [asked[index :: self._processes] for index in range(self._processes)]
        start = time.time() + 0.2
        work = [(share, load, start, longest) for share in shares if share]
        shares_done = self._pool.starmap(_ask_all, work)
        tokens = sum(part[0] for part in shares_done)
        if tokens != load.requests * load.output:
            raise AnswerError(f"expected {load.requests * load.output} tokens, found {tokens}")
        stop = max(part[1] for part in shares_done)
        gaps = [gap for part in shares_done for gap in part[2]]
        return Answered(
            tokens=tokens, seconds=stop - start, gaps=gaps, parts=sum(part[3] for part in shares_done)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.terminate()


def _ready(_: int) -> None:
    import aiohttp  # noqa: F401  (takes a second)


def _ask_all(
    share: list[tuple[str, dict[str, Any]]], load: HttpLoad, start: float, longest: float
) -> tuple[int, float, list[float], int]:
    """Tokens, the time of the end, gaps and parts of a process's share: URLs and bodies."""
    return asyncio.run(_all(share, load, start, longest))


async def _all(
    share: list[tuple[str, dict[str, Any]]], load: HttpLoad, start: float, longest: float
) -> tuple[int, float, list[float], int]:
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=longest)
    connector = aiohttp.TCPConnector(limit=0)
    gaps: list[float] = []
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        await asyncio.sleep(max(0.0, start - time.time()))
        requests = [_one(session, url, json.dumps(body).encode(), load, gaps) for url, body in share]
        answers = await asyncio.gather(*requests)
        stop = time.time()
    # whole answers are read once all have come: that takes these processes longer than some servers need to write them
    counted = [_count(answer) if isinstance(answer, bytes) else answer for answer in answers]
    return sum(tokens for tokens, _ in counted), stop, gaps, sum(parts for _, parts in counted)


def _count(answer: bytes) -> tuple[int, int]:
    """Tokens and parts of a whole answer."""
    return sum(len(choice["token_ids"]) for choice in json.loads(answer)["choices"]), 1


async def _one(
    session: Any, url: str, body: bytes, load: HttpLoad, gaps: list[float]
) -> tuple[int, int] | bytes:
    """Tokens and parts of a stream, or a whole answer as it came."""
    headers = {"Content-Type": "application/json"}
    async with session.post(url, data=body, headers=headers) as response:
        if response.status != 200:
            raise AnswerError(f"{url}: {response.status} {(await response.text())[:500]}")
        if not load.streamed:
            answer: bytes = await response.read()
            return answer
        tokens = parts = 0
        before: dict[int, float] = {}
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            now = time.perf_counter()
            for choice in json.loads(line[6:]).get("choices", ()):
                ids = choice.get("token_ids")
                if ids:
                    tokens += len(ids)
                    parts += 1
                    index = choice["index"]
                    if index in before:
                        gaps.append(now - before[index])
                    before[index] = now
        return tokens, parts
