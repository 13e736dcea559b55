# SPDX-License-Identifier: Apache-2.0
"""Logprobs in flat lists, and answers made of them, against vLLM's own of the same outputs."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine import logprobs as engine_logprobs
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

from vllm_fp8ext.compat.speed import flat_answers, flat_logprobs

WORDS = ("ab", "Ġab", "c", "\u0120de")
REPLACED = [
    (engine_logprobs, "convert_ids_list_to_tokens"),
    (LogprobsProcessor, "_update_sample_logprobs"),
    (LogprobsProcessor, "from_new_request"),
    (FlatLogprobs, "extend"),
    (OpenAIServingCompletion, "_create_completion_logprobs"),
    (OpenAIServingChat, "_create_chat_logprobs"),
    (ServingTokens, "_create_tokens_logprobs"),
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Byte level: 256 bytes, so that many characters are made of several tokens, and some words."""
    words = dict.fromkeys([*sorted(pre_tokenizers.ByteLevel.alphabet()), *WORDS])
    made = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


@pytest.fixture
def flat(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Installs what is tested; undone after the test."""

    def install() -> None:
        for owner, name in REPLACED:
            monkeypatch.setattr(owner, name, vars(owner)[name])
        flat_logprobs.install()
        flat_answers.install()

    return install


def processor(tokenizer: Any, asked: int) -> LogprobsProcessor:
    params = SamplingParams(logprobs=asked)
    request = EngineCoreRequest("r", [1], None, params, None, 0.0, None, None, None)
    return LogprobsProcessor.from_new_request(tokenizer, request)


def steps(size: int, asked: int, seed: int, most: int = 3) -> list[LogprobsLists]:
    """Of one to `most` positions each, in a batch whose widest request asks for two more; the sampled token is often among
    the best."""
    draw = np.random.default_rng(seed)
    width = (size if asked == -1 else asked + 1) + (0 if asked == -1 else 2)
    made = []
    for _ in range(30):
        count = int(draw.integers(1, most + 1))
        ids = np.stack([draw.permutation(size)[:width] for _ in range(count)]).astype(np.int32)
        if width > 1:
            again = draw.integers(0, width, size=count)
            ids[:, 0] = np.where(again > 0, ids[np.arange(count), again], ids[:, 0])
        logprobs = -draw.random((count, width)).astype(np.float32) * 9
        for row in range(count):  # a token has one logprob
            same = ids[row] == ids[row, 0]
            logprobs[row, same] = logprobs[row, 0]
        if draw.random() < 0.2:
            logprobs[0] = -np.inf
        ranks = draw.integers(1, size, size=count)
        made.append(LogprobsLists(ids, logprobs, ranks))
    return made


def updated(made: LogprobsProcessor, all_steps: list[LogprobsLists]) -> LogprobsProcessor:
    for step in all_steps:
        made._update_sample_logprobs(step)
    return made


@pytest.mark.parametrize("asked", [0, 1, 4, -1])
@pytest.mark.parametrize("decoded", [True, False])
def test_positions_are_vllms_own(tokenizer: Any, flat: Any, asked: int, decoded: bool) -> None:
    used = tokenizer if decoded else None
    given = steps(len(tokenizer), asked, seed=asked + 7)
    expected = updated(processor(used, asked), given)
    flat()
    result = updated(processor(used, asked), given)
    assert isinstance(result.logprobs, FlatLogprobs)
    assert list(result.logprobs) == expected.logprobs
    assert result.cumulative_logprob == expected.cumulative_logprob


def test_parts_of_characters_are_put_together(tokenizer: Any, flat: Any) -> None:
    """The bytes of an ä by themselves, and again in one output."""
    ids = tokenizer.convert_tokens_to_ids(["Ã", "¤"])
    flat()
    apart, together = processor(tokenizer, 0), processor(tokenizer, 0)
    rows = [LogprobsLists(np.array([[i]]), np.array([[-1.0]]), np.array([1])) for i in ids]
    updated(apart, rows)
    both = LogprobsLists(np.array(ids)[:, None], np.full((2, 1), -1.0), np.array([1, 1]))
    updated(together, [both])
    assert apart.logprobs is not None
    assert [position[i].decoded_token for i, position in zip(ids, apart.logprobs, strict=True)] == ["", "ä"]
    assert apart.logprobs == together.logprobs


def test_a_token_is_decoded_once(tokenizer: Any, flat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    flat()
    decoded: list[int] = []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **kw: decoded.extend(ids) or decode(ids, **kw))
    word = tokenizer.convert_tokens_to_ids("ab")
    row = LogprobsLists(np.array([[word]] * 5), np.full((5, 1), -1.0), np.ones(5, dtype=np.int64))
    updated(processor(tokenizer, 0), [row, row])
    updated(processor(tokenizer, 0), [row])
    assert decoded.count(word) <= 1


@pytest.mark.parametrize("asked", [0, 3])
def test_parts_of_a_stream_are_joined(tokenizer: Any, flat: Any, asked: int) -> None:
    given = steps(len(tokenizer), asked, seed=3)
    flat()
    whole = updated(processor(tokenizer, asked), given).logprobs
    assert isinstance(whole, FlatLogprobs)
    joined = whole[:10]
    joined.extend(whole[10:])
    assert joined == whole


def serving(kind: Any) -> Any:
    made = object.__new__(kind)
    made.return_tokens_as_token_ids = False
    return made


def answers(tokenizer: Any, asked: int, given: list[LogprobsLists], *, as_ids: bool) -> list[Any]:
    made = updated(processor(tokenizer, asked), given)
    ids = [int(row[0]) for step in given for row in step.logprob_token_ids]
    completion = serving(OpenAIServingCompletion)._create_completion_logprobs(
        token_ids=ids,
        top_logprobs=made.logprobs,
        num_output_top_logprobs=asked,
        tokenizer=tokenizer,
        initial_text_offset=5,
        return_as_token_id=as_ids,
    )
    chat = [
        serving(OpenAIServingChat)._create_chat_logprobs(
            ids, made.logprobs, tokenizer, top, return_as_token_id=as_ids
        )
        for top in (asked, None)
    ]
    tokens = [
        serving(ServingTokens)._create_tokens_logprobs(ids, made.logprobs, top) for top in (asked, None)
    ]
    every = [completion, *chat, *tokens]
    return [each.model_dump() for each in every] + [
        each.model_dump_json(exclude_unset=True) for each in every
    ]


@pytest.mark.parametrize("asked", [0, 1, 4, -1])
@pytest.mark.parametrize("as_ids", [False, True])
def test_answers_are_vllms_own(tokenizer: Any, flat: Any, asked: int, as_ids: bool) -> None:
    given = steps(len(tokenizer), asked, seed=asked + 11)
    expected = answers(tokenizer, asked, given, as_ids=as_ids)
    flat()
    assert answers(tokenizer, asked, given, as_ids=as_ids) == expected


def test_a_vllm_that_is_not_told_how_many_candidates_shows_all(tokenizer: Any, flat: Any) -> None:
    given = steps(len(tokenizer), 4, seed=3)
    ids = [int(row[0]) for step in given for row in step.logprob_token_ids]
    expected = serving(ServingTokens)._create_tokens_logprobs(
        ids, updated(processor(tokenizer, 4), given).logprobs, -1
    )
    flat()

    def later(self: Any, token_ids: Any, top_logprobs: Any) -> Any:
        raise AssertionError("positions are plain")

    made = updated(processor(tokenizer, 4), given)
    assert flat_answers._wrap_tokens(later)(serving(ServingTokens), ids, made.logprobs) == expected


def test_without_a_tokenizer_answers_are_vllms_own(tokenizer: Any, flat: Any) -> None:
    given = steps(len(tokenizer), 1, seed=5)

    def made() -> Any:
        result = updated(processor(None, 1), given).logprobs
        ids = [int(row[0]) for step in given for row in step.logprob_token_ids]
        create = serving(OpenAIServingCompletion)._create_completion_logprobs
        return create(ids, result, 1, tokenizer).model_dump()

    expected = made()
    flat()
    assert made() == expected
