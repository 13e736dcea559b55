# SPDX-License-Identifier: Apache-2.0
"""Makes the logprobs of answers from flat lists (`flat_logprobs`), without a dictionary of a token.

Where they get `FlatLogprobs` of plain positions, each begins with the token that was sampled. Answers are the same as vLLM's,
but pydantic does not check them again.
"""

import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from typing import Any

from vllm.logprobs import FlatLogprobs

from vllm_fp8ext.compat.wrapping import wrap

FEATURE: str = "flat_answers"
WHY: str = (
    "Make answers of flat logprobs: vLLM makes a dictionary of each token, looks through it, "
    "and checks it again."
)
GAIN: str = "not measured apart"
REPLACES: tuple[str, ...] = (
    "vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion._create_completion_logprobs("
    "token_ids, top_logprobs, num_output_top_logprobs, tokenizer, logprob_token_ids, "
    "initial_text_offset, return_as_token_id)",
    "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat._create_chat_logprobs("
    "token_ids, top_logprobs, tokenizer, num_output_top_logprobs, logprob_token_ids, "
    "return_as_token_id)",
    "vllm.entrypoints.scale_out.token_in_token_out.serving:ServingTokens._create_tokens_logprobs("
    "token_ids, top_logprobs)",
)
USES: dict[str, tuple[str, ...]] = {}
UPSTREAM: str = "https://github.com/vllm-project/vllm/pull/57442"
REMOVE_WHEN: str = "`flat_logprobs` goes"
NEEDS: tuple[str, ...] = ("flat_logprobs",)

LOWEST = -9999.0
"""The number in answers for minus infinity."""


def install() -> None:
    """Idempotent."""
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens

    wrap(OpenAIServingCompletion, "_create_completion_logprobs", _wrap_completion)
    wrap(OpenAIServingChat, "_create_chat_logprobs", _wrap_chat)
    wrap(ServingTokens, "_create_tokens_logprobs", _wrap_tokens)


def _is_plain(token_ids: Any, logprobs: Any, *, decoded: bool) -> bool:
    """Tell whether each position begins with its token, and has its string if wanted."""
    if not isinstance(logprobs, FlatLogprobs) or len(logprobs.start_indices) != len(token_ids):
        return False
    if decoded and None in logprobs.decoded_tokens:
        return False
    flat, starts = logprobs.token_ids, logprobs.start_indices
    if len(flat) == len(starts):
        return flat == list(token_ids)
    if any(start == stop for start, stop in zip(starts, logprobs.end_indices, strict=True)):
        return False
    return [flat[start] for start in starts] == list(token_ids)


def _clamped(logprobs: list[float]) -> list[float]:
    return [LOWEST if value < LOWEST else value for value in logprobs]


@cache
def _maker(model: Any, *names: str) -> Callable[..., Any]:
    """Return what makes objects of a pydantic model, unchecked.

    It is several times as fast as `model_construct`. Keywords are all of `names`; other fields have their defaults.
    """
    made = model.model_construct(**dict.fromkeys(names))
    defaults = {name: value for name, value in vars(made).items() if name not in names}
    given, extra = made.__pydantic_fields_set__, made.__pydantic_extra__
    new, put = model.__new__, object.__setattr__

    def make(**values: Any) -> Any:
        one = new(model)
        put(one, "__dict__", values | defaults if defaults else values)
        put(one, "__pydantic_fields_set__", given.copy())
        put(one, "__pydantic_extra__", None if extra is None else {})
        put(one, "__pydantic_private__", None)
        return one

    return make


def _candidates(flat: FlatLogprobs) -> Iterator[list[int]]:
    """For each position the indices of its tokens, each token once: the sampled one first, where it is among the best with
    the rank that it has there."""
    ids = flat.token_ids
    if len(ids) == len(flat.start_indices):
        yield from ([index] for index in range(len(ids)))
        return
    for start, stop in zip(flat.start_indices, flat.end_indices, strict=True):
        sampled = ids[start]
        again = next((index for index in range(start + 1, stop) if ids[index] == sampled), start)
        yield [again, *(index for index in range(start + 1, stop) if index != again)]


def _wrap_completion(original: Any) -> Any:
    def create(
        self: Any,
        token_ids: Any,
        top_logprobs: Any,
        num_output_top_logprobs: int,
        tokenizer: Any,
        logprob_token_ids: Any = None,
        initial_text_offset: int = 0,
        return_as_token_id: bool | None = None,
    ) -> Any:
        as_ids = self.return_tokens_as_token_ids if return_as_token_id is None else return_as_token_id
        flat = top_logprobs
        if logprob_token_ids or not _is_plain(token_ids, flat, decoded=not as_ids):
            return original(
                self,
                token_ids,
                top_logprobs,
                num_output_top_logprobs,
                tokenizer,
                logprob_token_ids,
                initial_text_offset,
                return_as_token_id,
            )
        from vllm.entrypoints.openai.completion.protocol import CompletionLogProbs

        texts = [f"token_id:{token}" for token in flat.token_ids] if as_ids else flat.decoded_tokens
        values = _clamped(flat.logprobs)
        if len(texts) == len(token_ids):
            tokens, sampled = list(texts), values
            top = [{text: value} for text, value in zip(texts, values, strict=True)]
        else:
            tokens = [texts[start] for start in flat.start_indices]
            sampled = [values[start] for start in flat.start_indices]
            most = None if num_output_top_logprobs == -1 else num_output_top_logprobs + 1
            if most == 2 and len(texts) == 2 * len(tokens):  # one candidate: what trainers ask for
                pairs = zip(tokens, sampled, texts[1::2], values[1::2], strict=True)
                top = [{text: value, best: of_best} for text, value, best, of_best in pairs]
            else:
                top = [
                    {texts[index]: values[index] for index in indices[:most]} for indices in _candidates(flat)
                ]
        offsets = list(itertools.accumulate(map(len, tokens[:-1]), initial=initial_text_offset))
        return CompletionLogProbs.model_construct(
            text_offset=offsets[: len(tokens)], token_logprobs=sampled, tokens=tokens, top_logprobs=top
        )

    return create


@lru_cache(maxsize=1 << 16)
def _bytes(text: str) -> list[int]:
    """Read only: shared by all answers."""
    return list(text.encode("utf-8", errors="replace"))


def _wrap_chat(original: Any) -> Any:
    def create(
        self: Any,
        token_ids: Any,
        top_logprobs: Any,
        tokenizer: Any,
        num_output_top_logprobs: int | None = None,
        logprob_token_ids: Any = None,
        return_as_token_id: bool | None = None,
    ) -> Any:
        flat = top_logprobs
        if logprob_token_ids or not _is_plain(token_ids, flat, decoded=True):
            return original(
                self,
                token_ids,
                top_logprobs,
                tokenizer,
                num_output_top_logprobs,
                logprob_token_ids,
                return_as_token_id,
            )
        from vllm.entrypoints.openai.chat_completion.protocol import (
            ChatCompletionLogProb,
            ChatCompletionLogProbs,
            ChatCompletionLogProbsContent,
        )

        as_ids = self.return_tokens_as_token_ids if return_as_token_id is None else return_as_token_id
        decoded, values = flat.decoded_tokens, _clamped(flat.logprobs)
        texts = [f"token_id:{token}" for token in flat.token_ids] if as_ids else decoded
        count = num_output_top_logprobs or 0
        most = None if count == -1 else count
        candidate = _maker(ChatCompletionLogProb, "token", "logprob", "bytes")
        position = _maker(ChatCompletionLogProbsContent, "token", "logprob", "bytes", "top_logprobs")
        content = [
            position(
                token=texts[indices[0]],
                logprob=values[indices[0]],
                bytes=_bytes(decoded[indices[0]]),
                top_logprobs=[
                    candidate(token=texts[index], logprob=values[index], bytes=_bytes(texts[index]))
                    for index in indices[:most]
                ],
            )
            for indices in _candidates(flat)
        ]
        return ChatCompletionLogProbs.model_construct(content=content)

    return create


def _wrap_tokens(original: Any) -> Any:
    # vLLM 0.32 is told how many candidates to show, later ones show all
    cuts = "num_output_top_logprobs" in inspect.signature(original).parameters

    def create(self: Any, token_ids: Any, top_logprobs: Any, *asked_for: Any, **named: Any) -> Any:
        flat = top_logprobs
        if not _is_plain(token_ids, flat, decoded=False):
            return original(self, token_ids, top_logprobs, *asked_for, **named)
        from vllm.entrypoints.scale_out.token_in_token_out.protocol import (
            GenerateLogProb,
            GenerateLogProbs,
            GenerateLogProbsContent,
        )

        count = next(iter((*asked_for, *named.values())), None) if cuts else -1
        most = 0 if count is None else None if count == -1 else max(count, 1)
        values = [LOWEST if math.isnan(value) or value < LOWEST else value for value in flat.logprobs]
        ids, ranks = flat.token_ids, flat.ranks
        candidate = _maker(GenerateLogProb, "token_id", "logprob", "rank")
        position = _maker(GenerateLogProbsContent, "token_id", "logprob", "rank", "top_logprobs")
        content = [
            position(
                token_id=ids[indices[0]],
                logprob=values[indices[0]],
                rank=ranks[indices[0]] or None,
                top_logprobs=[
                    candidate(token_id=ids[index], logprob=values[index], rank=ranks[index] or None)
                    for index in indices[:most]
                ],
            )
            for indices in _candidates(flat)
        ]
        return GenerateLogProbs.model_construct(content=content)

    return create
