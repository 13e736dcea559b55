# SPDX-License-Identifier: Apache-2.0
"""Questions that the end-to-end tests put to a server."""

import time
from typing import Any

import httpx

from vllm_fp8ext.checkpoints import problems
from vllm_fp8ext.demo.server import MODEL, Server

_SAMPLE = problems(3, seed=3)


def complete(server: Server, prompt: str | list[int], tokens: int = 8, **more: Any) -> dict[str, Any]:
    """One greedy completion, as the server's JSON."""
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "return_token_ids": True,
        **more,
    }
    reply: dict[str, Any] = (
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).raise_for_status().json()
    )
    return reply


def arrival_times(server: Server, prompt: str, tokens: int) -> list[float]:
    """When each token of a streamed completion came."""
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    found = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                found.append(time.perf_counter())
    return found


def outputs(server: Server) -> list[list[int]]:
    """Greedy tokens and their log-probabilities of a few prompts, one request at a time."""
    found = []
    for problem in _SAMPLE:
        choice = complete(server, problem.prompt, 12, logprobs=1, ignore_eos=True)["choices"][0]
        found.append([choice["token_ids"], choice["logprobs"]["token_logprobs"]])
    return found


def state(server: Server) -> dict[str, Any]:
    """Everything that a refused update must leave as it was."""
    with server.client() as client:
        weights = client.weights()
        return {
            "epoch": weights.epoch,
            "version": weights.version,
            "digests": client.digests().model_dump(),
            "outputs": outputs(server),
        }


def metric(server: Server, name: str) -> float:
    """Sum of a Prometheus metric."""
    text = httpx.get(f"{server.url}/metrics", timeout=30).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name + "{"))
