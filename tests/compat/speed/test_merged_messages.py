# SPDX-License-Identifier: Apache-2.0
"""Messages that wait while an API server is late."""

import asyncio
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
)
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_fp8ext.compat.speed import merged_messages


class Client(SimpleNamespace):
    """A client whose queue holds messages already."""

    def __init__(self, *messages: Any) -> None:
        super().__init__(outputs_queue=asyncio.Queue(), _ensure_output_queue_task=lambda: None)
        self._format_exception = lambda error: error
        for message in messages:
            self.outputs_queue.put_nowait(message)

    def receive(self) -> list[Any]:
        """Everything that is waiting, as the output handler gets it."""

        async def take() -> list[Any]:
            received = []
            while not self.outputs_queue.empty() or merged_messages._NEXT in vars(self):
                received.append(await AsyncMPClient.get_output_async(self))
            return received

        return asyncio.run(take())


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrapped during a test: others wrap the method in an order of their own."""
    monkeypatch.setattr(AsyncMPClient, "get_output_async", AsyncMPClient.get_output_async)
    merged_messages.install()


def message(*outputs: EngineCoreOutput, version: str | None = "a", **more: Any) -> EngineCoreOutputs:
    return EngineCoreOutputs(outputs=list(outputs), weight_version=version, **more)


def tokens(received: list[EngineCoreOutputs], name: str) -> list[list[int]]:
    return [output.new_token_ids for each in received for output in each.outputs if output.request_id == name]


def test_tokens_of_a_request_in_waiting_messages_are_processed_together() -> None:
    steps = [
        message(EngineCoreOutput("r", [step]), EngineCoreOutput("s", [step + 10]), engine_index=0)
        for step in range(4)
    ]
    received = Client(*steps).receive()
    assert tokens(received, "r") == [[0, 1, 2, 3]]
    assert tokens(received, "s") == [[10, 11, 12, 13]]
    assert len(received) == len(steps)  # their statistics come


def test_versions_and_engines_stay_apart() -> None:
    steps = [
        message(EngineCoreOutput("r", [1])),
        message(EngineCoreOutput("r", [2]), version="b"),
        message(EngineCoreOutput("r", [3]), version="b", engine_index=1),
    ]
    assert tokens(Client(*steps).receive(), "r") == [[1], [2], [3]]


def test_a_first_token_and_an_end_keep_what_they_say() -> None:
    event = EngineCoreEvent.new_event(EngineCoreEventType.SCHEDULED)
    steps = [
        message(EngineCoreOutput("r", [1], events=[event])),
        message(EngineCoreOutput("r", [2])),
        message(EngineCoreOutput("r", [3], finish_reason=FinishReason.LENGTH)),
    ]
    received = Client(*steps).receive()
    assert tokens(received, "r") == [[1], [2, 3]]
    ends = [output for each in received for output in each.outputs]
    assert ends[0].events == [event]
    assert ends[1].finish_reason == FinishReason.LENGTH


def test_an_engine_that_has_died_is_told_of() -> None:
    client = Client(message(EngineCoreOutput("r", [1])), EngineDeadError())
    with pytest.raises(EngineDeadError):
        client.receive()


@given(st.lists(st.lists(st.sampled_from("rst"), unique=True), min_size=1, max_size=90))
def test_no_token_is_lost_or_out_of_order(steps: list[list[str]]) -> None:
    messages = [
        message(*(EngineCoreOutput(name, [step]) for name in names)) for step, names in enumerate(steps)
    ]
    received = Client(*messages).receive()
    for name in "rst":
        expected = [step for step, names in enumerate(steps) if name in names]
        assert list(chain.from_iterable(tokens(received, name))) == expected
        assert all(len(part) <= merged_messages.MOST_TOKENS + 1 for part in tokens(received, name))
