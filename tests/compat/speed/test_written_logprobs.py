# SPDX-License-Identifier: Apache-2.0
"""Logprobs of answers that are written as text, against what vLLM makes and Starlette writes."""

import asyncio
import json
from collections.abc import Callable, Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from starlette.responses import JSONResponse
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

from vllm_fp8ext.compat.speed import json_responses, written_logprobs
from vllm_fp8ext.compat.speed.json_responses import ROUTERS, FastJSONResponse

from .test_flat_logprobs import flat, processor, serving, steps, tokenizer, updated

__all__ = ["flat", "tokenizer"]

NAMES = {0: "completions", 1: "chat", 2: "chat without candidates", 3: "generate", 4: "generate, none asked"}


@pytest.fixture(autouse=True)
def nothing_written() -> Iterator[None]:
    yield
    written_logprobs.end()


def makers(tokenizer: Any, logprobs: Any, ids: list[int], asked: int, *, as_ids: bool) -> list[Any]:
    """What makes each answer's logprobs, as vLLM's handlers call it."""
    completion, chat = serving(OpenAIServingCompletion), serving(OpenAIServingChat)
    tokens = serving(ServingTokens)
    return [
        lambda: completion._create_completion_logprobs(
            token_ids=ids,
            top_logprobs=logprobs,
            num_output_top_logprobs=asked,
            tokenizer=tokenizer,
            initial_text_offset=5,
            return_as_token_id=as_ids,
        ),
        *(
            lambda top=top: chat._create_chat_logprobs(
                ids, logprobs, tokenizer, top, return_as_token_id=as_ids
            )
            for top in (asked, None)
        ),
        *(lambda top=top: tokens._create_tokens_logprobs(ids, logprobs, top) for top in (asked, None)),
    ]


def sampled(given: list[LogprobsLists]) -> list[int]:
    return [int(row[0]) for step in given for row in step.logprob_token_ids]


def written(make: Callable[[], Any]) -> tuple[bytes, bool]:
    """The body of an answer of two choices with the same logprobs, and whether they were written as text."""
    written_logprobs.begin()
    made = [make(), make()]
    writing = written_logprobs.current()
    assert writing is not None
    used = bool(writing._texts)
    return FastJSONResponse(
        {"choices": [{"text": "NaN", "logprobs": one.model_dump()} for one in made]}
    ).body, used


@pytest.mark.parametrize("asked", [0, 1, 4, -1])
@pytest.mark.parametrize("as_ids", [False, True])
def test_texts_say_what_vllm_says(tokenizer: Any, flat: Any, asked: int, as_ids: bool) -> None:
    given = steps(len(tokenizer), asked, seed=asked + 11)
    ids = sampled(given)
    own = updated(processor(tokenizer, asked), given).logprobs
    expected = [make().model_dump() for make in makers(tokenizer, own, ids, asked, as_ids=as_ids)]
    flat()
    logprobs = updated(processor(tokenizer, asked), given).logprobs
    for index, make in enumerate(makers(tokenizer, logprobs, ids, asked, as_ids=as_ids)):
        body, used = written(make)
        assert used, NAMES[index]
        choice = {"text": "NaN", "logprobs": expected[index]}
        assert json.loads(body) == {"choices": [choice, choice]}, NAMES[index]
        assert list(json.loads(body)["choices"][0]["logprobs"]) == list(expected[index])


def test_characters_are_escaped_as_starlette_does(tokenizer: Any, flat: Any) -> None:
    """Each byte alone: controls, quotes, a backslash, and parts of characters."""
    ids = list(range(len(tokenizer)))
    given = [LogprobsLists(np.array([[i, 3]]), np.array([[-1.5, -2.0]]), np.array([2])) for i in ids]
    flat()
    logprobs = updated(processor(tokenizer, 1), given).logprobs
    for make in makers(tokenizer, logprobs, ids, 1, as_ids=False):
        choice = {"text": "NaN", "logprobs": make().model_dump()}
        body, used = written(make)
        assert used
        assert body == JSONResponse({"choices": [choice, choice]}).body


@pytest.mark.parametrize(
    ("name", "kind", "prepared"),
    [
        ("chatcmpl-1", RequestOutputKind.FINAL_ONLY, 1),
        ("chatcmpl-1", RequestOutputKind.DELTA, 0),
        ("cmpl-1", RequestOutputKind.FINAL_ONLY, 0),
    ],
)
def test_tokens_of_chats_are_written_when_they_come(
    tokenizer: Any, flat: Any, name: str, kind: RequestOutputKind, prepared: int
) -> None:
    flat()
    params = SamplingParams(logprobs=0, output_kind=kind)
    request = EngineCoreRequest("r", [1], None, params, None, 0.0, None, None, None)
    request.external_req_id = name
    made = LogprobsProcessor.from_new_request(tokenizer=tokenizer, request=request)
    word = tokenizer.convert_tokens_to_ids("ab")
    written_logprobs.chat_token.cache_clear()
    row = LogprobsLists(np.array([[word]] * 3), np.full((3, 1), -1.0), np.ones(3, dtype=np.int64))
    updated(made, [row])
    assert written_logprobs.chat_token.cache_info().currsize == prepared


def test_candidates_of_one_text_are_one(flat: Any) -> None:
    assert written_logprobs.pairs(["a", "a", "a", "b"], ["-1.0", "-2.0", "-3.0", "-4.0"]) == [
        '{"a":-2.0}',
        '{"a":-3.0,"b":-4.0}',
    ]
    assert written_logprobs.several([[("a", "-1.0"), ("a", "-2.0")]]) == ['{"a":-2.0}']


def test_what_is_no_number_is_refused_as_before(tokenizer: Any, flat: Any) -> None:
    given = [LogprobsLists(np.array([[1]]), np.array([[np.nan]]), np.array([0]))]
    flat()
    logprobs = updated(processor(tokenizer, 0), given).logprobs
    with pytest.raises(ValueError, match="not JSON compliant"):
        written(makers(tokenizer, logprobs, [1], 0, as_ids=False)[0])


def test_an_answer_that_nobody_writes_has_its_logprobs(tokenizer: Any, flat: Any) -> None:
    given = steps(len(tokenizer), 1, seed=2)
    flat()
    logprobs = updated(processor(tokenizer, 1), given).logprobs
    for make in makers(tokenizer, logprobs, sampled(given), 1, as_ids=False):
        assert "fp8ext" not in str(make().model_dump())


def test_a_model_with_another_field_is_written_by_pydantic(
    tokenizer: Any, flat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = steps(len(tokenizer), 1, seed=2)
    flat()
    logprobs = updated(processor(tokenizer, 1), given).logprobs
    monkeypatch.setattr(written_logprobs, "_has_our_fields", lambda model: False)
    for make in makers(tokenizer, logprobs, sampled(given), 1, as_ids=False):
        choice = {"text": "NaN", "logprobs": make().model_dump()}
        body, used = written(make)
        assert not used
        assert json.loads(body) == {"choices": [choice, choice]}


def test_logprobs_that_an_answer_leaves_out_are_not_written(tokenizer: Any, flat: Any) -> None:
    """As of a choice whose reasoning is hidden."""
    given = steps(len(tokenizer), 0, seed=4)
    flat()
    logprobs = updated(processor(tokenizer, 0), given).logprobs
    make = makers(tokenizer, logprobs, sampled(given), 0, as_ids=False)[1]
    expected = make().model_dump()
    written_logprobs.begin()
    choices = [make().model_dump() for _ in range(4)]
    body = FastJSONResponse([choices[0], None, choices[2], choices[3]]).body
    assert json.loads(body) == [expected, None, expected, expected]


@pytest.mark.parametrize("router", list(ROUTERS))
@pytest.mark.parametrize("streamed", [False, True])
def test_only_whole_answers_are_written(router: str, streamed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = import_module(router)
    function, method = ROUTERS[router]
    monkeypatch.setattr(module, "JSONResponse", JSONResponse)
    monkeypatch.setattr(module, function, getattr(module, function))
    json_responses.install()
    seen: list[bool] = []

    async def answer(request: Any, raw_request: Any) -> str:
        seen.append(written_logprobs.current() is not None)
        return "answer"

    handler = SimpleNamespace(**{method: answer}, other=7)
    names = ("openai_serving_completion", "openai_serving_chat", "serving_tokens")
    state = SimpleNamespace(**dict.fromkeys(names, handler))
    raw = SimpleNamespace(app=SimpleNamespace(state=state))
    answering = getattr(module, function)(raw)

    async def ask() -> None:
        assert await getattr(answering, method)(SimpleNamespace(stream=streamed), raw) == "answer"
        assert (written_logprobs.end() is None) == streamed
        assert written_logprobs.current() is None

    asyncio.run(ask())
    assert seen == [not streamed]
    assert answering.other == 7


def test_a_server_without_the_route_has_no_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = import_module(next(iter(ROUTERS)))
    monkeypatch.setattr(module, "completion", module.completion)
    json_responses.install()
    state = SimpleNamespace(openai_serving_completion=None)
    assert module.completion(SimpleNamespace(app=SimpleNamespace(state=state))) is None
