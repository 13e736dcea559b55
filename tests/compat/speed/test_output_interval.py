# SPDX-License-Identifier: Apache-2.0
"""What clients are sent of the outputs of an engine, held back and not."""

import queue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
)
from vllm.v1.metrics.stats import IterationStats, LoRARequestStates, RequestStateStats
from vllm.v1.outputs import LogprobsLists

from vllm_fp8ext.compat.speed import output_interval
from vllm_fp8ext.compat.speed.output_interval import PART_SECONDS, OutputHolder
from vllm_fp8ext.config import ServingSettings

WHOLE, DELTA = RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA


class Engine:
    """Requests, and what was sent of them."""

    def __init__(self, interval: int = 4, stream_interval: int = 1, many_streams_interval: int = 1) -> None:
        self.requests: dict[str, Any] = {}
        self.sent: list[tuple[int, EngineCoreOutputs]] = []
        self.holder = OutputHolder(
            self.requests,
            self.sent.append,
            interval=interval,
            stream_interval=stream_interval,
            many_streams_interval=many_streams_interval,
        )

    def add(self, name: str, kind: RequestOutputKind = WHOLE, **params: Any) -> None:
        sampling = SamplingParams(output_kind=kind, **params)
        self.requests[name] = SimpleNamespace(sampling_params=sampling, resumable=False, num_output_tokens=5)

    def step(
        self, *outputs: EngineCoreOutput, version: str | None = "a", at: float = 1.0, **more: Any
    ) -> None:
        message = EngineCoreOutputs(outputs=list(outputs), weight_version=version, timestamp=at, **more)
        self.holder.put((0, message))

    def tokens(self, name: str) -> list[tuple[str | None, list[int]]]:
        """Of each message that holds some: its version and the tokens."""
        return [
            (message.weight_version, output.new_token_ids)
            for _, message in self.sent
            for output in message.outputs
            if output.request_id == name and output.new_token_ids
        ]


def token(name: str, value: int, **more: Any) -> EngineCoreOutput:
    return EngineCoreOutput(name, [value], **more)


def logprobs(value: float, width: int = 1) -> LogprobsLists:
    row = np.arange(width, dtype=np.int32)[None]
    return LogprobsLists(row, np.full((1, width), value, dtype=np.float32), np.array([7]))


def test_tokens_of_a_whole_answer_are_sent_together() -> None:
    engine = Engine(interval=4)
    engine.add("r")
    for value in range(9):
        engine.step(token("r", value))
    engine.step(token("r", 9, finish_reason=FinishReason.LENGTH))
    assert engine.tokens("r") == [("a", [0, 1, 2, 3]), ("a", [4, 5, 6, 7]), ("a", [8, 9])]
    assert engine.sent[-1][1].outputs[0].finish_reason == FinishReason.LENGTH


def test_a_first_token_is_sent_at_once() -> None:
    engine = Engine()
    engine.add("r")
    event = EngineCoreEvent.new_event(EngineCoreEventType.SCHEDULED)
    engine.step(token("r", 1, events=[event]))
    assert engine.tokens("r") == [("a", [1])]


@pytest.mark.parametrize(
    ("kind", "params"),
    [(DELTA, {}), (RequestOutputKind.CUMULATIVE, {}), (WHOLE, {"stop": ["x"]})],
    ids=["streamed", "cumulative", "stop strings"],
)
def test_who_looks_at_each_token_gets_each_token(kind: RequestOutputKind, params: dict[str, Any]) -> None:
    engine = Engine()
    engine.add("r", kind, **params)
    for value in range(3):
        engine.step(token("r", value))
    assert engine.tokens("r") == [("a", [0]), ("a", [1]), ("a", [2])]


@pytest.mark.parametrize(("of_request", "of_engine"), [(3, 1), (None, 3), (2, 3)])
def test_streams_that_asked_for_an_interval_are_sent_by_it(of_request: int | None, of_engine: int) -> None:
    engine = Engine(stream_interval=of_engine)
    engine.add("r", DELTA, stream_interval=of_request)
    for value in range(6):
        engine.step(token("r", value))
    assert engine.tokens("r") == [("a", [0, 1, 2]), ("a", [3, 4, 5])]


@pytest.mark.parametrize(("share", "sizes"), [(1.1, {1}), (0.9, {3})])
def test_streams_of_short_steps_are_sent_a_few_tokens_at_a_time_in_turn(
    share: float, sizes: set[int]
) -> None:
    """`share`: of the time that their parts take, a step's."""
    engine = Engine(many_streams_interval=3)
    names = [f"r{index}" for index in range(30)]
    for name in names:
        engine.add(name, DELTA)
    for value in range(13):
        at = 1 + value * share * PART_SECONDS * len(names)
        engine.step(*(token(name, value) for name in names), at=at)
    parts = {name: [tokens for _, tokens in engine.tokens(name)] for name in names}
    assert {len(part) for of_one in parts.values() for part in of_one[2:]} == sizes
    assert len({len(of_one[1]) for of_one in parts.values()}) == max(sizes)  # not all in the same step
    engine.holder.flush()
    assert all(
        [value for _, tokens in engine.tokens(name) for value in tokens] == list(range(13)) for name in names
    )


def test_a_long_step_sends_what_streams_hold() -> None:
    """As one that also reads a prompt. An interval that a client asked for stays."""
    engine = Engine(many_streams_interval=8)
    engine.add("asked", DELTA, stream_interval=4)
    engine.add("whole")
    names = ["asked", "whole", *(f"r{index}" for index in range(9))]
    for name in names[2:]:
        engine.add(name, DELTA)
    for value, at in enumerate((0.0, 1e-4, 0.1)):
        engine.step(*(token(name, value) for name in names), at=1 + at)
    assert engine.tokens("asked") == engine.tokens("whole") == []
    for name in names[2:]:
        assert [value for _, tokens in engine.tokens(name) for value in tokens] == [0, 1, 2]


def test_an_end_without_tokens_is_sent_where_nothing_is_held() -> None:
    engine = Engine()
    engine.add("r")
    engine.add("s", DELTA)
    for name in "rs":
        engine.step(EngineCoreOutput(name, [], finish_reason=FinishReason.ABORT), version=None)
    assert [message.outputs[0].request_id for _, message in engine.sent] == ["r", "s"]


def test_a_new_version_sends_what_the_old_one_sampled_first() -> None:
    engine = Engine()
    engine.add("r")
    engine.add("other")
    engine.step(token("r", 1), token("other", 1))
    engine.step(token("r", 2), version="b")
    engine.step(EngineCoreOutput("r", [], finish_reason=FinishReason.ABORT), version=None)
    assert engine.tokens("r") == [("a", [1]), ("b", [2])]
    assert engine.tokens("other") == [("a", [1])]


def test_what_is_held_long_is_sent_with_the_next_message() -> None:
    engine = Engine(interval=100)
    engine.add("slow")
    engine.add("r")
    engine.step(token("slow", 1), at=1.0)
    engine.step(token("r", 1), at=1.4)
    assert engine.sent == []
    engine.step(token("r", 2), at=1.8)
    assert engine.tokens("slow") == [("a", [1])]
    assert engine.tokens("r") == []


def test_requests_that_begin_together_are_not_sent_together() -> None:
    engine = Engine(interval=4)
    for name in "abcd":
        engine.add(name)
    for value in range(8):
        for request in engine.requests.values():
            request.num_output_tokens = value + 2  # a first one was sent before
        engine.step(*(token(name, value) for name in "abcd"))
    assert [len(message.outputs) for _, message in engine.sent] == [1] * 8


def test_messages_that_say_something_else_pass() -> None:
    engine = Engine()
    engine.add("r")
    engine.step(token("r", 1), finished_requests={"gone"})
    assert engine.sent[0][1].outputs == []
    engine.holder.put(b"ENGINE_CORE_DEAD")
    assert engine.sent.pop() == b"ENGINE_CORE_DEAD"
    assert engine.tokens("r") == [("a", [1])]


def test_logprobs_come_with_their_tokens_and_as_wide_as_all_have_them() -> None:
    engine = Engine(interval=3)
    engine.add("r", logprobs=0)
    for value, width in enumerate((1, 3, 1)):
        engine.step(token("r", value, new_logprobs=logprobs(-float(value), width)))
    (result,) = [output for _, message in engine.sent for output in message.outputs]
    assert result.new_logprobs.logprobs.tolist() == [[0.0], [-1.0], [-2.0]]
    assert result.new_logprobs.logprob_token_ids.shape == (3, 1)
    assert result.new_logprobs.sampled_token_ranks.tolist() == [7, 7, 7]


STEPS = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from(["v", "w", None]), st.booleans()), max_size=60
)


@settings(max_examples=150)
@given(steps=STEPS, interval=st.integers(2, 9))
def test_nothing_is_lost_swapped_or_labelled_otherwise(
    steps: list[tuple[str, str | None, bool]], interval: int
) -> None:
    engine = Engine(interval)
    given_tokens: dict[str, list[tuple[str | None, int]]] = {"a": [], "b": [], "c": []}
    for name in "abc":
        engine.add(name)
    for value, (name, version, event) in enumerate(steps):
        given_tokens[name].append((version, value))
        events = [EngineCoreEvent.new_event(EngineCoreEventType.QUEUED)] if event else None
        engine.step(token(name, value, events=events), version=version, at=1 + value / 100)
    for name in "abc":
        engine.step(EngineCoreOutput(name, [], finish_reason=FinishReason.LENGTH), version="v", at=2)
        sent = [(version, value) for version, values in engine.tokens(name) for value in values]
        assert sent == given_tokens[name]


def test_a_queue_gives_what_is_to_be_sent() -> None:
    outputs: queue.Queue[Any] = queue.Queue()
    requests = {"r": SimpleNamespace(sampling_params=SamplingParams(output_kind=WHOLE), resumable=False)}
    requests["r"].num_output_tokens = 5
    core: Any = SimpleNamespace(
        output_queue=outputs,
        scheduler=SimpleNamespace(requests=requests),
        vllm_config=SimpleNamespace(scheduler_config=SimpleNamespace(stream_interval=1)),
    )
    output_interval.attach(core, ServingSettings(output_interval=3))
    for value in range(4):
        outputs.put_nowait((0, EngineCoreOutputs(outputs=[token("r", value)], weight_version="a")))
    outputs.put_nowait(b"ENGINE_CORE_DEAD")
    result = [outputs.get() for _ in range(3)]
    assert [message.outputs[0].new_token_ids for _, message in result[:2]] == [[0, 1, 2], [3]]
    assert result[2] == b"ENGINE_CORE_DEAD"


@pytest.mark.parametrize("queued", [False, True], ids=["no queue", "nothing to do"])
def test_an_engine_without_a_queue_or_an_interval_is_left_alone(queued: bool) -> None:
    core: Any = SimpleNamespace(output_queue=queue.Queue()) if queued else SimpleNamespace()
    output_interval.attach(
        core, ServingSettings(output_interval=1, stream_interval=1, flat_logprobs=not queued)
    )
    assert not queued or "get" not in vars(core.output_queue)


@pytest.mark.parametrize(("rust", "packed"), [(None, True), ("1", False)])
def test_logprobs_are_packed_for_who_unpacks_them(
    rust: str | None, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rust:
        monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", rust)
    core: Any = SimpleNamespace(
        output_queue=queue.Queue(),
        scheduler=SimpleNamespace(requests={}),
        vllm_config=SimpleNamespace(scheduler_config=SimpleNamespace(stream_interval=1)),
    )
    output_interval.attach(core, ServingSettings())
    outputs = [token("r", 1, new_logprobs=logprobs(0.5)), token("s", 1, new_logprobs=logprobs(0.25))]
    core.output_queue.put_nowait((0, EngineCoreOutputs(outputs=outputs)))
    _, message = core.output_queue.get()
    assert (message.outputs[1].new_logprobs is None) is packed


def test_each_token_counts_in_the_inter_token_latencies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IterationStats, "update_from_output", IterationStats.update_from_output)
    output_interval.install()
    stats, request = IterationStats(), RequestStateStats(arrival_time=0.0)
    request.last_token_ts = 1.0
    output = EngineCoreOutput("r", [1, 2, 3, 4])
    stats.update_from_output(output, 3.0, False, request, LoRARequestStates(False), None)
    assert stats.inter_token_latencies_iter == [0.5] * 4
    assert request.last_token_ts == 3.0
