# SPDX-License-Identifier: Apache-2.0
"""Makes the logprobs of answers from flat lists (`flat_logprobs`), without a dictionary of a token.

Where they get `FlatLogprobs` of plain positions, each begins with the token that was sampled. Answers are the same as vLLM's,
but pydantic does not check them again.
"""

import inspect
import itertools
import math
import secrets
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from vllm.logprobs import FlatLogprobs

from vllm_fp8ext.compat.speed import written_logprobs
from vllm_fp8ext.compat.speed.unchecked_models import maker
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


def _has_one_candidate(flat: FlatLogprobs) -> bool:
    """Tell whether each position has the sampled token and one more: what trainers ask for."""
    return flat.start_indices == list(range(0, len(flat.token_ids), 2))


def _candidates(flat: FlatLogprobs) -> Iterator[list[int]]:
    """For each position the indices of its tokens, each token once: the sampled one first, where it is among the best with
    the rank that it has there."""
    ids = flat.token_ids
    if len(ids) == len(flat.start_indices):
        yield from ([index] for index in range(len(ids)))
        return
    if _has_one_candidate(flat):
        yield from (
            [start + 1] if ids[start] == ids[start + 1] else [start, start + 1]
            for start in flat.start_indices
        )
        return
    for start, stop in zip(flat.start_indices, flat.end_indices, strict=True):
        sampled = ids[start]
        again = next((index for index in range(start + 1, stop) if ids[index] == sampled), start)
        yield [again, *(index for index in range(start + 1, stop) if index != again)]


def _offsets(tokens: list[str], start: int) -> list[int]:
    return list(itertools.accumulate(map(len, tokens[:-1]), initial=start))[: len(tokens)]


def _completion_text(
    flat: FlatLogprobs, texts: Sequence[Any], written: list[str], most: int | None, start: int
) -> str:
    """The JSON of a completion's logprobs, whose numbers are `written`."""
    tokens = [texts[index] for index in flat.start_indices]
    sampled = [written[index] for index in flat.start_indices]
    if len(texts) == len(tokens):
        top = written_logprobs.single(texts, written)
    elif most == 2 and _has_one_candidate(flat):
        top = written_logprobs.pairs(texts, written)
    else:
        rows = ([(texts[index], written[index]) for index in indices[:most]] for indices in _candidates(flat))
        top = written_logprobs.several(rows)
    return written_logprobs.completion(_offsets(tokens, start), tokens, sampled, top)


def _construct_completion(offsets: Any, sampled: Any, tokens: Any, top: Any) -> Any:
    from vllm.entrypoints.openai.completion.protocol import CompletionLogProbs

    make = maker(CompletionLogProbs, "text_offset", "token_logprobs", "tokens", "top_logprobs")
    return make(text_offset=offsets, token_logprobs=sampled, tokens=tokens, top_logprobs=top)


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
        most = None if num_output_top_logprobs == -1 else num_output_top_logprobs + 1
        writing = written_logprobs.current(CompletionLogProbs)
        written = None if writing is None else written_logprobs.numbers(values)
        if writing is not None and written is not None:
            text = _completion_text(flat, texts, written, most, initial_text_offset)
            return writing.put(_construct_completion([], [], [written_logprobs.unused_key()], []), text)
        tokens = [texts[start] for start in flat.start_indices]
        sampled = [values[start] for start in flat.start_indices]
        if len(texts) == len(tokens):
            top = [{text: value} for text, value in zip(texts, values, strict=True)]
        elif most == 2 and _has_one_candidate(flat):
            pairs = zip(tokens, sampled, texts[1::2], values[1::2], strict=True)
            top = [{text: value, best: of_best} for text, value, best, of_best in pairs]
        else:
            top = [{texts[index]: values[index] for index in indices[:most]} for indices in _candidates(flat)]
        return _construct_completion(_offsets(tokens, initial_text_offset), sampled, tokens, top)

    return create


@lru_cache(maxsize=1 << 16)
def _bytes(text: str) -> list[int]:
    """Read only: shared by all answers."""
    return list(text.encode("utf-8", errors="replace"))


def _chat_text(
    flat: FlatLogprobs, texts: Sequence[Any], decoded: Sequence[Any], written: list[str], most: int | None
) -> str:
    """The JSON of a chat's logprobs, whose numbers are `written`."""
    token = written_logprobs.chat_token
    tokens = candidates = list(map(token, decoded))
    if texts is not decoded:
        candidates = [written_logprobs.chat_token_named(text, text) for text in texts]
        tokens = list(map(written_logprobs.chat_token_named, texts, decoded))
    if len(tokens) == len(flat.start_indices) and most == 0:
        return written_logprobs.sampled_chat(tokens, written)
    if most == 0:
        first = [indices[0] for indices in _candidates(flat)]
        return written_logprobs.sampled_chat(
            [tokens[index] for index in first], [written[index] for index in first]
        )
    return written_logprobs.chat(
        (
            tokens[indices[0]],
            written[indices[0]],
            [(candidates[index], written[index]) for index in indices[:most]],
        )
        for indices in _candidates(flat)
    )


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
        candidate = maker(ChatCompletionLogProb, "token", "logprob", "bytes")
        position = maker(ChatCompletionLogProbsContent, "token", "logprob", "bytes", "top_logprobs")
        writing = written_logprobs.current(
            ChatCompletionLogProbs, ChatCompletionLogProbsContent, ChatCompletionLogProb
        )
        written = None if writing is None else written_logprobs.numbers(values)
        if writing is not None and written is not None:
            key = position(token=written_logprobs.unused_key(), logprob=0.0, bytes=None, top_logprobs=[])
            stand_in = ChatCompletionLogProbs.model_construct(content=[key])
            return writing.put(stand_in, _chat_text(flat, texts, decoded, written, most))
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


def _generated_text(flat: FlatLogprobs, written: list[str], most: int | None) -> str:
    """The JSON of generated tokens' logprobs, whose numbers are `written`."""
    tokens = list(zip(flat.token_ids, written, flat.ranks, strict=True))
    if len(tokens) == len(flat.start_indices) and most != 0:
        return written_logprobs.sampled_generated(tokens)
    return written_logprobs.generated(
        ([tokens[index] for index in indices] for indices in _candidates(flat)), most
    )


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
        candidate = maker(GenerateLogProb, "token_id", "logprob", "rank")
        position = maker(GenerateLogProbsContent, "token_id", "logprob", "rank", "top_logprobs")
        writing = written_logprobs.current(GenerateLogProbs, GenerateLogProbsContent, GenerateLogProb)
        written = None if writing is None else written_logprobs.numbers(values)
        if writing is not None and written is not None:
            key = position(token_id=secrets.randbits(62), logprob=0.0, rank=None, top_logprobs=[])
            stand_in = GenerateLogProbs.model_construct(content=[key])
            return writing.put(stand_in, _generated_text(flat, written, most))
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
