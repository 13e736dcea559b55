# SPDX-License-Identifier: Apache-2.0
"""What requests beside a measurement ask for, against a server that answers at once, and what is made of its counts."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from vllm_fp8ext.bench import background
from vllm_fp8ext.bench.background import ANSWER_TOKENS, PROMPT_TOKENS

RUNNING = 8


class Answers(BaseHTTPRequestHandler):
    """Notes each request, and answers it after a moment."""

    def do_GET(self) -> None:
        self._answer(f"vllm:generation_tokens_total{{}} {time.monotonic() * 1000}\n")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)  # type: ignore[attr-defined]  # ours
        time.sleep(0.05)
        self._answer("data: {}\n\ndata: [DONE]\n\n" if body.get("stream") else "{}")

    def _answer(self, text: str) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as serving:
        serving.bodies = []  # type: ignore[attr-defined]  # ours
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield serving
        serving.shutdown()


def longer(bodies: list[dict[str, Any]]) -> list[int]:
    """Lengths of prompts that begin within an answer."""
    return sorted(length for body in bodies if (length := len(body["prompt"])) > PROMPT_TOKENS)


def test_contexts_are_spread_evenly_from_the_first_request_on(server: ThreadingHTTPServer) -> None:
    bodies: list[dict[str, Any]] = server.bodies  # type: ignore[attr-defined]  # ours
    with background._Load(f"http://127.0.0.1:{server.server_port}", RUNNING):
        until = time.monotonic() + 300
        while (len(bodies) < 8 * RUNNING or len(longer(bodies)) < RUNNING - 1) and time.monotonic() < until:
            time.sleep(0.01)
    assert longer(bodies) == [PROMPT_TOKENS + ANSWER_TOKENS // RUNNING * slot for slot in range(1, RUNNING)]
    assert {len(body["prompt"]) + body["max_tokens"] for body in bodies} == {PROMPT_TOKENS + ANSWER_TOKENS}
    starts = [tuple(body["prompt"][:16]) for body in bodies]
    assert len(set(starts)) == len(starts), "no block of theirs is in a prefix cache"


def test_tokens_lost_are_those_of_the_mean_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SETTLE_SECONDS", "RATE_SECONDS"):
        monkeypatch.setattr(background, name, 1.0)
    load = background._Load("http://nowhere", 1)
    rates = [(10.0, 100.0), (11.0, 90.0), (12.0, 50.0), (13.0, 0.0), (14.0, 80.0), (15.0, 0.0)]
    tokens = 0.0
    for start, rate in rates:  # each for a second
        load._counts.append((start, tokens))
        tokens += rate
    load._counts.append((16.0, tokens))
    monkeypatch.setattr(load, "_wait", lambda seconds: None)
    result = load.during(11.0, 13.0)
    assert (result["tokens_per_s_before"], result["tokens_per_s_during"]) == (100.0, 70.0)
    assert result["tokens_per_s_after"] == 80.0
    assert result["tokens_lost"] == pytest.approx(1 - 70 / 90)


class Clock:
    """Time that passes where it is waited."""

    now = 0.0

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(background._Load, "_wait", self._wait)
        monkeypatch.setattr(background.time, "monotonic", lambda: self.now)

    def _wait(self, seconds: float) -> None:
        self.now += seconds

    def tell(self, load: background._Load, rates: list[float]) -> None:
        """Its tokens a second, each for half of `RATE_SECONDS`."""
        tokens = 0.0
        for index, rate in enumerate([*rates, 0]):
            load._counts.append((index * background.RATE_SECONDS / 2, tokens))
            tokens += rate * background.RATE_SECONDS / 2


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.mark.parametrize(
    ("rates", "waits"), [([100, 95], 1), ([0, 0, 100, 100], 2), ([0, 100, 100, 95], 2), ([0, 100] * 9, 5)]
)
def test_what_is_measured_begins_once_tokens_come_steadily(
    rates: list[float], waits: int, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While kernels compile none come at first."""
    load = background._Load("http://nowhere", 1)
    monkeypatch.setattr(background, "PATIENCE_SECONDS", 45.0)
    clock.tell(load, rates)
    load.settle()
    assert clock.now == waits * background.RATE_SECONDS
    assert load._steady == (waits < 5)


@pytest.mark.parametrize(("rates", "waits"), [([100, 95], 0), ([0, 100, 100, 95], 1)])
def test_the_rate_after_something_is_the_one_before_the_next_if_it_was_steady(
    rates: list[float], waits: int, clock: Clock
) -> None:
    load = background._Load("http://nowhere", 1)
    clock.now = background.RATE_SECONDS
    clock.tell(load, rates)
    load.settle(rested=True)
    assert clock.now == (1 + waits) * background.RATE_SECONDS
    assert load._steady
