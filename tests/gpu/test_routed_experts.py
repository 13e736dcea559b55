# SPDX-License-Identifier: Apache-2.0
"""The experts of each token, as vLLM returns them for routing replay, before and after an update."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from vllm_fp8ext.checkpoints import problems
from vllm_fp8ext.demo.server import MODEL, SMALL, Server

pytestmark = pytest.mark.gpu

EARLY, LATE = (Path(__file__).parents[1] / "e2e" / "mixture" / name for name in ("early", "late"))
PROMPTS = [problem.prompt + problem.answer for problem in problems(20, seed=5)]
LAYERS, CHOSEN = 2, 2
CACHED = 128
"""Tokens of all prompts together, of 240, that are certainly cached."""


@pytest.fixture(scope="module", params=[(), ("--enforce-eager",)], ids=["graphs", "eager"])
def servers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Server]]:
    """One on each checkpoint."""
    folder = tmp_path_factory.mktemp("routed")
    options = [option for option in SMALL if option != "--enforce-eager"]
    arguments = [*options, *request.param, "--enable-return-routed-experts"]
    started = {
        path.name: Server(path, folder / f"{path.name}.log", arguments=arguments) for path in (EARLY, LATE)
    }
    try:
        for server in started.values():
            server.wait(600)
        yield started
    finally:
        for server in started.values():
            server.stop()


def routes(server: Server) -> list[np.ndarray]:
    """Of each prompt: `[tokens, layers, experts]`, sorted within a token."""
    return [routed(server, prompt) for prompt in PROMPTS]


def routed(server: Server, prompt: str) -> np.ndarray:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).raise_for_status().json()
    array = np.load(io.BytesIO(base64.b64decode(reply["choices"][0]["routed_experts"])))
    return np.sort(array, axis=-1)


def equal(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_routes_follow_the_weights(servers: dict[str, Server]) -> None:
    early, late = (routes(servers[name]) for name in ("early", "late"))
    assert {array.shape[1:] for array in early} == {(LAYERS, CHOSEN)}
    assert not equal(early, late)
    with servers["early"].client() as client:
        client.push(LATE, version="late")
        assert equal(routes(servers["early"]), late)
        client.rollback()
    assert equal(routes(servers["early"]), early)


def test_what_is_cached_of_other_weights_is_not_returned(servers: dict[str, Server]) -> None:
    """A prompt long enough to be cached: its routes are those of the weights that are served. Its end is not cached, but
    computed again in a smaller batch, by which a near tie may turn: it is not compared."""
    server, prompt = servers["early"], "".join(PROMPTS)
    before, cached = (routed(server, prompt)[:CACHED] for _ in range(2))
    assert len(before) == CACHED
    assert np.array_equal(before, cached)
    with server.client() as client:
        client.push(LATE, version="late")
        after = routed(server, prompt)[:CACHED]
        assert np.array_equal(after, routed(servers["late"], prompt)[:CACHED])
        assert not np.array_equal(after, before)
        client.rollback()
