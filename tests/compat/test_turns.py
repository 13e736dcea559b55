# SPDX-License-Identifier: Apache-2.0
"""While vLLM waits for the output of a step, and only then, lanes need not wait."""

from typing import Any

import pytest
from vllm.v1.executor.uniproc_executor import AsyncOutputFuture
from vllm.v1.outputs import AsyncModelRunnerOutput

from vllm_fp8ext.compat import turns as compat
from vllm_fp8ext.weights.turns import Turns


class Watched(Turns):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def give(self) -> None:
        self.seen.append("give")

    def take(self) -> None:
        self.seen.append("take")


class Output(AsyncModelRunnerOutput):
    def __init__(self, turns: Watched, problem: Exception | None = None) -> None:
        self.turns, self.problem = turns, problem

    def get_output(self) -> Any:
        self.turns.seen.append("output")
        if self.problem:
            raise self.problem
        return "tokens"


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    found = Watched()
    monkeypatch.setattr(compat, "turns", found)
    monkeypatch.setattr(AsyncOutputFuture, "result", AsyncOutputFuture.result)
    compat.take_turns()
    compat.take_turns()
    return found


def test_lanes_have_the_turn_while_an_output_is_waited_for(watched: Watched) -> None:
    assert AsyncOutputFuture(Output(watched), True).result() == "tokens"
    assert watched.seen == ["give", "output", "take"]


def test_also_when_the_step_failed(watched: Watched) -> None:
    with pytest.raises(RuntimeError, match="no memory"):
        AsyncOutputFuture(Output(watched, RuntimeError("no memory")), True).result()
    assert watched.seen == ["give", "output", "take"]
