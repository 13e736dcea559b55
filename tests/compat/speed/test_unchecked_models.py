# SPDX-License-Identifier: Apache-2.0
"""Parts of streams that nobody checks, against those that pydantic checks."""

import warnings
from importlib import import_module
from typing import Any

import pytest
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
)
from vllm.entrypoints.openai.completion.protocol import (
    CompletionLogProbs,
    CompletionResponseStreamChoice,
    CompletionStreamResponse,
)
from vllm.entrypoints.serve.engine.protocol import UsageInfo

from vllm_fp8ext.compat.speed import unchecked_models
from vllm_fp8ext.compat.speed.unchecked_models import unchecked

LOGPROBS = {"text_offset": [0], "token_logprobs": [-0.5], "tokens": ["ä"], "top_logprobs": [{"ä": -0.5}]}


def completion(part: Any, choice: Any, **more: Any) -> Any:
    chosen = choice(
        index=1,
        text='ä"\n',
        logprobs=CompletionLogProbs(**LOGPROBS),
        finish_reason=None,
        stop_reason=None,
        prompt_token_ids=None,
        token_ids=[7, 8],
    )
    return part(id="a", object="text_completion", created=3, model="m", choices=[chosen], **more)


def chat(part: Any, choice: Any, **more: Any) -> Any:
    chosen = choice(
        index=0, delta=DeltaMessage(content="ä"), logprobs=None, finish_reason=None, token_ids=[7], **more
    )
    return part(id="a", object="chat.completion.chunk", created=3, choices=[chosen], model="m")


PARTS = {
    "completion": (completion, CompletionStreamResponse, CompletionResponseStreamChoice, {}),
    "completion, usage": (
        completion,
        CompletionStreamResponse,
        CompletionResponseStreamChoice,
        {"usage": UsageInfo(prompt_tokens=1, total_tokens=2)},
    ),
    "chat": (chat, ChatCompletionStreamResponse, ChatCompletionResponseStreamChoice, {}),
    "chat, stop": (
        chat,
        ChatCompletionStreamResponse,
        ChatCompletionResponseStreamChoice,
        {"stop_reason": 5},
    ),
}


@pytest.mark.parametrize("case", PARTS)
@pytest.mark.parametrize(
    "how", [{"exclude_unset": True}, {"exclude_none": True}, {}], ids=["set", "not none", "all"]
)
def test_parts_dump_as_those_that_are_checked(case: str, how: dict[str, bool]) -> None:
    build, part, choice, more = PARTS[case]
    expected = build(part, choice, **more)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = build(unchecked(part), unchecked(choice), **more)
        assert found.model_dump_json(**how) == expected.model_dump_json(**how)
        for one in (found, expected):
            one.system_fingerprint = "f"
        assert found.model_dump_json(**how) == expected.model_dump_json(**how)
    assert found == expected


def test_parts_do_not_share_what_is_set_later() -> None:
    make = unchecked(CompletionStreamResponse)
    first, second = (make(id="a", created=3, model="m", choices=[]) for _ in range(2))
    first.usage = UsageInfo()
    assert second.usage is None
    assert "usage" not in second.model_dump(exclude_unset=True)


def test_other_values_are_checked() -> None:
    """A missing field gets its own default, or is an error. An unknown one is kept, as the model keeps it."""
    make = unchecked(CompletionStreamResponse)
    first, second = (make(model="m", choices=[]) for _ in range(2))
    assert first.id != second.id
    assert make(model="m", choices=[], more=1).model_dump()["more"] == 1
    with pytest.raises(ValueError, match="choices"):
        make(model="m")


def test_the_routes_take_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in unchecked_models.REPLACES:
        module, _, model = name.partition(":")
        monkeypatch.setattr(import_module(module), model, globals()[model])
    for _ in range(2):
        unchecked_models.install()
    for name in unchecked_models.REPLACES:
        module, _, model = name.partition(":")
        assert getattr(import_module(module), model).__wrapped__ is globals()[model]
