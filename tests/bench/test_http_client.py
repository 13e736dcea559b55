# SPDX-License-Identifier: Apache-2.0
"""Clients of the benchmark over HTTP count what a server answers as the test says."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from vllm_fp8ext.bench import http_client
from vllm_fp8ext.bench.http_client import AnswerError, HttpLoad

LOAD = HttpLoad(requests=3, samples=1, tokens=4, output=5, vocabulary=9)
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def server(answer: Answer) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}/v1/completions"
    finally:
        await runner.cleanup()


def ask(answer: Answer, load: HttpLoad) -> tuple[int, float, list[float], int]:
    async def run() -> tuple[int, float, list[float], int]:
        async with server(answer) as url:
            return await http_client._all([(url, body) for body in load.bodies(0)], load, 0.0, 10)

    return asyncio.run(run())


async def whole(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    choices = [{"index": i, "token_ids": [7] * body["max_tokens"]} for i in range(body.get("n", 1))]
    return web.json_response({"choices": choices})


async def streamed(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    for ids in ([1], [2, 3], [4, 5], []):
        part = {"choices": [{"index": 0, "token_ids": ids}]}
        await response.write(f"data: {json.dumps(part)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response


def test_tokens_of_whole_answers_are_counted() -> None:
    tokens, _, gaps, parts = ask(whole, LOAD)
    assert (tokens, gaps, parts) == (15, [], 3)


def test_tokens_of_all_samples_are_counted() -> None:
    tokens, _, _, parts = ask(whole, replace(LOAD, requests=4, samples=2, one_request=True))
    assert (tokens, parts) == (20, 2)


def test_parts_of_streams_are_counted_with_their_gaps() -> None:
    tokens, _, gaps, parts = ask(streamed, replace(LOAD, streamed=True))
    assert (tokens, parts, len(gaps)) == (15, 9, 6)


def test_the_time_ends_with_the_last_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the answers is not the server's time."""
    now = [100.0]
    count = http_client._count

    def slow(answer: bytes) -> Any:
        now[0] += 50
        return count(answer)

    monkeypatch.setattr(http_client, "_count", slow)
    monkeypatch.setattr(http_client.time, "time", lambda: now[0])
    assert ask(whole, LOAD)[1] == 100.0


def test_an_answer_that_is_no_success_is_an_error() -> None:
    async def refuse(request: web.Request) -> web.StreamResponse:
        return web.Response(status=503, text="poisoned")

    with pytest.raises(AnswerError, match="503 poisoned"):
        ask(refuse, LOAD)
