# SPDX-License-Identifier: Apache-2.0
"""What requests are told of weights, in vLLM's own states and responses."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.openai.responses.context import SimpleContext
from vllm.entrypoints.scale_out.token_in_token_out import protocol
from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan
from vllm.v1.engine.output_processor import RequestState

from vllm_fp8ext.compat.update.dialect_versions import _spans_in
from vllm_fp8ext.compat.update.weight_versions import EpochSpan, install
from vllm_fp8ext.update.contract.labels import Label, Step, first_label

FIRST = first_label("0a1b")
SECOND = FIRST.next("step 1")
THIRD = SECOND.next("step 2")


@pytest.fixture
def state() -> Any:
    """Of a request `r` without tokens."""
    install()
    state = object.__new__(RequestState)
    state.request_id, state.weight_version_starts = "r", []
    state.detokenizer = SimpleNamespace(tokens=0)
    state.detokenizer.num_output_tokens = lambda: state.detokenizer.tokens
    return state


def sampled(state: Any, label: Label, held: dict[str, list[Label]] | None = None, tokens: int = 1) -> None:
    """A step has sampled tokens."""
    told = {name: [one.encode() for one in labels] for name, labels in (held or {}).items()}
    state.track_weight_version(Step(label.encode(), told).encode())
    state.detokenizer.tokens += tokens


def spans(state: Any) -> list[tuple[int, int, int]]:
    return [(span.epoch, span.start, span.end) for span in state._weight_version_spans()]


def test_weights_that_computed_k_and_v_come_before_those_that_sampled(state: Any) -> None:
    sampled(state, THIRD, {"r": [FIRST, SECOND], "another": [SECOND]})
    sampled(state, THIRD, tokens=3)
    assert spans(state) == [(0, 0, 0), (1, 0, 0), (2, 0, 4)]


def test_what_is_told_of_other_requests_begins_no_span(state: Any) -> None:
    sampled(state, FIRST)
    sampled(state, FIRST, {"another": [FIRST]})
    sampled(state, FIRST)
    assert spans(state) == [(0, 0, 3)]


def test_weights_that_sampled_some_tokens_are_not_told_again(state: Any) -> None:
    sampled(state, FIRST)
    sampled(state, THIRD, {"r": [FIRST, SECOND]})
    assert spans(state) == [(0, 0, 1), (1, 1, 1), (2, 1, 2)]


def test_spans_have_epoch_and_instance(state: Any) -> None:
    sampled(state, SECOND)
    assert state._weight_version_spans() == [EpochSpan("step 1", 0, 1, 1, "0a1b")]


@pytest.mark.parametrize(
    ("choice", "response", "more"),
    [
        (protocol.GenerateTokensChoice, protocol.GenerateTokensResponse, {}),
        (protocol.GenerateTextChoice, protocol.GenerateTextResponse, {"text": ""}),
        (protocol.GenerateTokensStreamChoice, protocol.GenerateTokensStreamResponse, {}),
        (protocol.GenerateTextStreamChoice, protocol.GenerateTextStreamResponse, {"text": ""}),
    ],
)
def test_generated_tokens_have_epochs_too(choice: Any, response: Any, more: dict[str, Any]) -> None:
    install()
    span = EpochSpan.of(WeightVersionSpan(SECOND.encode(), 0, 3))
    made = response(choices=[choice(index=0, weight_versions=[span], **more)])
    [told] = made.model_dump()["choices"]
    expected = {"version": "step 1", "start": 0, "end": 3, "epoch": 1, "instance": "0a1b"}
    assert told["weight_versions"] == [expected]
    assert '"epoch":1,"instance":"0a1b"' in made.model_dump_json()


def test_a_response_has_the_spans_of_all_turns() -> None:
    install()
    context = SimpleContext()
    for first, end in ((0, 3), (1, 2)):
        span = EpochSpan("step", first, end, 4, "0a1b")
        output = CompletionOutput(0, "", [7] * end, None, None, finish_reason="stop", weight_versions=[span])
        context.append_output(RequestOutput("r", None, [1], None, [output], True))
    spans = [(span.start, span.end, span.epoch) for span in context.fp8ext_spans]  # type: ignore[attr-defined]  # ours
    assert spans == [(0, 3, 4), (4, 5, 4)]


@pytest.mark.parametrize(
    "chunk", ["data: [DONE]", "data: {}", "event: x", 'data: {"choices": [{"weight_versions": null}]}']
)
def test_a_chunk_without_spans(chunk: str) -> None:
    assert _spans_in(chunk) is None
