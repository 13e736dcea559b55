# SPDX-License-Identifier: Apache-2.0
"""A client that does everything at random while others ask; the recorded history must be one that could have been.

Checked afterwards: every response names, without gaps, which weights sampled its tokens; they are ones that were being served
while it ran, in their order; no epoch is skipped or used twice; nothing was served that was not committed; and the tokens
of an answer that one epoch gave are the ones that its checkpoint gives.
"""

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest

from vllm_fp8ext.checkpoints import EARLY, LATE, problems
from vllm_fp8ext.demo.server import Server
from vllm_fp8ext.errors import UpdateError

from .ask import complete
from .conftest import on_early

CHECKPOINTS = {"early": EARLY, "late": LATE}
ASKED = [problem.prompt for problem in problems(6, seed=21)]


@dataclass(frozen=True)
class Served:
    """An epoch, and between which times it may have come to be served."""

    epoch: int
    label: str
    begun: float
    done: float


@dataclass(frozen=True)
class Answer:
    prompt: str
    asked: float
    answered: float
    token_ids: tuple[int, ...]
    spans: tuple[dict[str, Any], ...]


class Trainer:
    """Does one random step after the other, and writes down what the server said to it."""

    def __init__(self, server: Server, seed: int, steps: int) -> None:
        self.server = server
        self.steps = steps
        self.choose = random.Random(seed)
        with server.client() as client:
            weights = client.weights()
        self.history = [Served(weights.epoch, weights.version, 0.0, time.monotonic())]
        self.previous: str | None = None
        self.refused: list[str] = []

    def run(self, answered: Callable[[], None]) -> None:
        """`answered` waits until a request that was asked after a step has been answered."""
        for _ in range(self.steps):
            answered()
            getattr(
                self, self.choose.choice(["push", "push", "rollback", "half", "spoiled", "stale", "twice"])
            )()

    def push(self) -> None:
        label = self.choose.choice(list(CHECKPOINTS))
        running: Any = self.choose.choice(["keep", "recompute", "wait", "abort"])
        begun = time.monotonic()
        with self.server.client() as client:
            update = client.push(
                CHECKPOINTS[label],
                version=label,
                running=running,
                chunk_bytes=self.choose.choice([1 << 19, 1 << 21, 1 << 30]),
            )
        assert update.result is not None
        self._served(update.result["epoch"], label, begun)

    def rollback(self) -> None:
        begun = time.monotonic()
        with self.server.client() as client:
            if self.previous is None:
                self._refused("no-previous", client.rollback)
                return
            label = self.previous
            done = client.rollback(self.choose.choice(["keep", "recompute", "abort"]))
        assert done.version == label
        self._served(done.epoch, label, begun)

    def half(self) -> None:
        """Sent and given up: the previous weights are gone, those that are served are not."""
        with self.server.client() as client:
            update = client.open(version="never")
            body = (LATE / "model.safetensors").read_bytes()
            client.put_chunk(update.id, 0, body, len(body))
            client.abandon(update.id)
        self.previous = None

    def spoiled(self) -> None:
        with self.server.client() as client:
            update = client.open(version="never")
            body = (LATE / "model.safetensors").read_bytes()[: self.choose.randrange(100, 100_000)]
            self._refused("broken-safetensors", lambda: client.put_chunk(update.id, 0, body, len(body)))
            self._refused("incomplete", lambda: client.commit(update.id))
            client.abandon(update.id)

    def stale(self) -> None:
        with self.server.client() as client:
            wrong = self.history[-1].epoch + self.choose.choice([-1, 1])
            self._refused("stale-base", lambda: client.open(base_epoch=max(wrong, 0) or 10**6))

    def twice(self) -> None:
        with self.server.client() as client:
            update = client.open(version="never")
            self._refused("update-open", lambda: client.open(version="never"))
            client.abandon(update.id)

    def _served(self, epoch: int, label: str, begun: float) -> None:
        self.previous = self.history[-1].label
        self.history.append(Served(epoch, label, begun, time.monotonic()))

    def _refused(self, kind: str, call: Any) -> None:
        with pytest.raises(UpdateError) as refused:
            call()
        assert refused.value.kind == kind
        self.refused.append(kind)


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("tp1", 15),
        pytest.param("tp1", 30, marks=pytest.mark.full),
        pytest.param("tp2", 6, marks=pytest.mark.full),  # with two ranks on two cores each step takes long
    ],
)
def test_a_random_history_could_have_been(servers: dict[str, Server], name: str, steps: int):
    server = on_early(servers[name])
    expected = _expected(server)
    trainer = Trainer(server, 5, steps)
    stop = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        answers: list[Answer] = []
        askers = [pool.submit(_ask, server, seed, stop, answers) for seed in (1, 2)]

        def answered() -> None:
            now = time.monotonic()
            while not any(answer.asked > now for answer in answers):
                assert not any(asker.done() for asker in askers), [asker.result() for asker in askers]
                time.sleep(0.05)

        try:
            trainer.run(answered)
            answered()
        finally:
            stop.set()
        for asker in askers:
            asker.result()
    epochs = {entry.epoch: entry for entry in trainer.history}
    assert sorted(epochs) == [entry.epoch for entry in trainer.history]
    assert all(b.epoch == a.epoch + 1 for a, b in pairwise(trainer.history))
    assert len(answers) > steps
    whole = [answer for answer in answers if _check(answer, epochs)]
    wrong = [
        answer
        for answer in whole
        if answer.token_ids != expected[answer.spans[0]["version"], answer.prompt][: len(answer.token_ids)]
    ]
    assert not wrong
    assert {answer.spans[0]["version"] for answer in whole} >= ({"early", "late"} if name == "tp1" else set())


def _expected(server: Server) -> dict[tuple[str, str], tuple[int, ...]]:
    """What each checkpoint answers, asked one request at a time; on_early has pushed the early one."""
    collected = {}
    for label in ("late", "early"):
        with server.client() as client:
            client.push(CHECKPOINTS[label], version=label)
        for prompt in ASKED:
            tokens = complete(server, prompt, 12)["choices"][0]["token_ids"]
            collected[label, prompt] = tuple(tokens)
    return collected


def _ask(server: Server, seed: int, stop: threading.Event, answers: list[Answer]) -> None:
    choose = random.Random(seed)
    while not stop.is_set():
        prompt, asked = choose.choice(ASKED), time.monotonic()
        choice = complete(server, prompt, 12)["choices"][0]
        spans = tuple(choice.get("weight_versions") or ())
        answers.append(Answer(prompt, asked, time.monotonic(), tuple(choice["token_ids"]), spans))


def _check(answer: Answer, epochs: dict[int, Served]) -> bool:
    """Require that the answer's spans are possible; True when one epoch gave all of it."""
    spans = answer.spans
    if not answer.token_ids:
        return False  # aborted before its first token
    assert spans[0]["start"] == 0
    assert spans[-1]["end"] == len(answer.token_ids)
    for span in spans:
        entry = epochs[span["epoch"]]
        assert span["version"] == entry.label
        assert entry.begun < answer.answered, "sampled by weights that were sent later"
        after = epochs.get(span["epoch"] + 1)
        assert after is None or after.done > answer.asked, "sampled by weights that were no longer served"
    for a, b in pairwise(spans):
        assert a["end"] == b["start"]
        assert a["epoch"] < b["epoch"]
    return len(spans) == 1
