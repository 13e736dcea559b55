# SPDX-License-Identifier: Apache-2.0
"""Questions that the end-to-end tests put to a server."""

import json
import re
import threading
import time
from typing import Any

import httpx

from vllm_fp8ext.checkpoints import problems
from vllm_fp8ext.demo.server import MODEL, Server

API_KEY = "the-api-key"
"""Of those servers here that ask for one; the others do not look at it."""
HEADERS = {"Authorization": f"Bearer {API_KEY}"}

ATTEMPTS = 8
"""At committing while a request runs: on a busy machine it may have ended when the commit comes."""

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
        httpx.post(f"{server.url}/v1/completions", json=body, headers=HEADERS, timeout=120)
        .raise_for_status()
        .json()
    )
    return reply


def cache_config(server: Server) -> dict[str, str]:
    """What the server says of its KV cache (`num_gpu_blocks`, `block_size`, …)."""
    metrics = httpx.get(f"{server.url}/metrics", timeout=60).raise_for_status().text
    [line] = [line for line in metrics.splitlines() if line.startswith("vllm:cache_config_info{")]
    return dict(re.findall(r'(\w+)="([^"]*)"', line))


class Stream:
    """A streamed completion that runs beside the test, from its first token on."""

    def __init__(self, server: Server, prompt: str = "12+34=", tokens: int = 1200) -> None:
        self.token_ids: list[int] = []
        self.weight_versions: list[dict[str, Any]] = []
        self.finish: str | None = None
        """Its finish reason, or how it broke off."""
        self._first = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(server, prompt, tokens))
        self._thread.start()
        assert self._first.wait(300), "no token came"

    def wait(self, seconds: float = 300) -> None:
        """Until it ends, however that is."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "a running request was not answered"

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    @property
    def came_too_early(self) -> bool:
        """Whether it ended by itself with tokens of one epoch only: no commit can have met it."""
        return self.finish == "length" and len(self.weight_versions) == 1

    def _run(self, server: Server, prompt: str, tokens: int) -> None:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
        body |= {"ignore_eos": True, "return_token_ids": True}
        url = f"{server.url}/v1/completions"
        try:
            with httpx.stream("POST", url, json=body, headers=HEADERS, timeout=120) as reply:
                for line in reply.iter_lines():
                    if line.startswith("data: {"):
                        self._take(json.loads(line[6:]))
        except httpx.HTTPError as error:
            self.finish = repr(error)
        finally:
            self._first.set()

    def _take(self, event: dict[str, Any]) -> None:
        if "choices" not in event:
            self.finish = json.dumps(event)
            return
        for choice in event["choices"]:
            self.token_ids += choice.get("token_ids") or []
            self.weight_versions += choice.get("weight_versions") or []
            self.finish = choice["finish_reason"] or self.finish
        self._first.set()


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
    collected = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                collected.append(time.perf_counter())
    return collected


def outputs(server: Server) -> list[list[int]]:
    """Greedy tokens and their log-probabilities of a few prompts, one request at a time."""
    collected = []
    for problem in _SAMPLE:
        choice = complete(server, problem.prompt, 12, logprobs=1, ignore_eos=True)["choices"][0]
        collected.append([choice["token_ids"], choice["logprobs"]["token_logprobs"]])
    return collected


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


def metrics(server: Server, name: str) -> dict[str, float]:
    """Samples of a Prometheus metric, by label set."""
    collected = {}
    for line in httpx.get(f"{server.url}/metrics", timeout=120).text.splitlines():
        label, _, value = line.rpartition(" ")
        if label == name or label.startswith(name + "{"):
            collected[label[len(name) :].strip("{}")] = float(value)
    return collected


def metric(server: Server, name: str) -> float:
    """Sum of a Prometheus metric."""
    return sum(metrics(server, name).values())


def nats_behind(server: Server, prompt: list[int], tokens: list[int]) -> list[float]:
    """Tell by how many nats each token is less likely than the likeliest one at its place.

    The weights that are served judge.
    """
    judged = complete(server, prompt + tokens, 1, prompt_logprobs=1)["choices"][0]["prompt_logprobs"]
    return [
        max(of["logprob"] for of in row.values()) - row[str(token)]["logprob"]
        for row, token in zip(judged[len(prompt) :], tokens, strict=True)
    ]
