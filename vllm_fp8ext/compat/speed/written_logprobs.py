# SPDX-License-Identifier: Apache-2.0
"""Writes the logprobs of a whole answer as JSON text, without objects of tokens.

An answer that is about to be written as JSON holds a short stand-in where its logprobs belong, and `Writing` the text that
takes its place. To make, copy and write some thousand objects an answer took the API server longer than the answers'
tokens took the GPU to sample, where many answers end together.
"""

import math
import secrets
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from functools import cache, lru_cache
from json.encoder import encode_basestring
from typing import Any

from pydantic_core import to_json

FEATURE: str = "json_responses"
WHY: str = "Write logprobs as text: vLLM makes an object of each token, copies it and writes it."
GAIN: str = "an answer of 1,024 tokens by `/v1/chat/completions` in a fifth of the time (a CPU)"
REPLACES: tuple[str, ...] = ()
USES: dict[str, tuple[str, ...]] = {}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM's routes write their models as JSON at once"

FIELDS: dict[str, tuple[str, ...]] = {
    "CompletionLogProbs": ("text_offset", "token_logprobs", "tokens", "top_logprobs"),
    "ChatCompletionLogProbs": ("content",),
    "ChatCompletionLogProbsContent": ("token", "logprob", "bytes", "top_logprobs"),
    "ChatCompletionLogProb": ("token", "logprob", "bytes"),
    "GenerateLogProbs": ("content",),
    "GenerateLogProbsContent": ("token_id", "logprob", "rank", "top_logprobs"),
    "GenerateLogProb": ("token_id", "logprob", "rank"),
}
"""Fields of vLLM's models that are written here, in their order."""
TOKENS = 1 << 18
"""Texts of tokens that are kept as JSON."""

_BYTES = tuple(map(str, range(256)))
_writing: ContextVar["Writing | None"] = ContextVar("fp8ext_writing", default=None)


class Writing:
    """Texts that take the places of an answer's stand-ins."""

    def __init__(self) -> None:
        self._texts: dict[bytes, bytes] = {}

    def put(self, stand_in: Any, text: str) -> Any:
        """Have `text` written where the answer holds `stand_in`. Returns that: a model of pydantic that is like no other."""
        self._texts[to_json(stand_in.model_dump())] = text.encode()
        return stand_in

    def fill(self, body: bytes) -> bytes:
        """Put the texts into the JSON of an answer."""
        pieces, position = [], 0
        for stand_in, text in self._texts.items():
            start = body.find(stand_in, position)  # choices come in the order in which they were made
            if start >= 0:  # an answer may leave logprobs out
                pieces += [body[position:start], text]
                position = start + len(stand_in)
        return b"".join([*pieces, body[position:]])


def begin() -> None:
    """Have the answer that this task makes next written with `Writing`."""
    _writing.set(Writing())


def end() -> Writing | None:
    """Return what was put since `begin`; the answer after it is another one."""
    writing = _writing.get()
    _writing.set(None)
    return writing


def current(*models: Any) -> Writing | None:
    """Return what texts are put into; None where nobody writes them, or these models have other fields."""
    writing = _writing.get()
    return writing if writing is not None and all(map(_has_our_fields, models)) else None


@cache
def _has_our_fields(model: Any) -> bool:
    return tuple(model.model_fields) == FIELDS[model.__name__]


def unused_key() -> str:
    """Return a text that no answer has."""
    return f"fp8ext:{secrets.token_hex(16)}"


def numbers(values: list[float]) -> list[str] | None:
    """Write floats; None if one of them is no number in JSON."""
    if not values:
        return []
    return to_json(values)[1:-1].decode().split(",") if math.isfinite(sum(values)) else None


def completion(offsets: list[int], tokens: list[str], logprobs: Sequence[str], top: Iterable[str]) -> str:
    """Write the logprobs of a completion. `top`: the candidates of each position, written."""
    return (
        f'{{"text_offset":{to_json(offsets).decode()},"token_logprobs":[{",".join(logprobs)}],'
        f'"tokens":{to_json(tokens).decode()},"top_logprobs":[{",".join(top)}]}}'
    )


def single(tokens: Iterable[str], logprobs: Iterable[str]) -> list[str]:
    """Write the candidates of positions that have one each."""
    names = map(encode_basestring, tokens)
    return [f"{{{name}:{value}}}" for name, value in zip(names, logprobs, strict=True)]


def pairs(tokens: Iterable[str], logprobs: Iterable[str]) -> list[str]:
    """Write the candidates of positions that have two each, one after the other."""
    names, values = map(encode_basestring, tokens), iter(logprobs)
    return [
        f"{{{first}:{value},{second}:{of_second}}}" if first != second else f"{{{first}:{of_second}}}"
        for first, second, value, of_second in zip(names, names, values, values, strict=True)
    ]


def several(top: Iterable[Iterable[tuple[str, str]]]) -> list[str]:
    """Write the candidates of positions: tokens and their logprobs."""
    return [
        f"{{{','.join([f'{encode_basestring(token)}:{value}' for token, value in dict(row).items()])}}}"
        for row in top
    ]


@lru_cache(maxsize=TOKENS)
def chat_token(text: str) -> tuple[str, str]:
    """Return what stands before and behind the logprob of a token in a chat."""
    return chat_token_named(text, text)


def chat_token_named(name: str, text: str) -> tuple[str, str]:
    """Return the same of a token that is called otherwise."""
    encoded = ",".join([_BYTES[byte] for byte in text.encode("utf-8", errors="replace")])
    return f'{{"token":{encode_basestring(name)},"logprob":', f',"bytes":[{encoded}]'


def chat(positions: Iterable[tuple[tuple[str, str], str, Iterable[tuple[tuple[str, str], str]]]]) -> str:
    """Write the logprobs of a chat. `positions`: `chat_token` and logprob of each token, and the same of its candidates."""
    return _content(
        [
            f'{before}{value}{behind},"top_logprobs":[{",".join([f"{b}{v}{e}}}" for (b, e), v in best])}]}}'
            for (before, behind), value, best in positions
        ]
    )


def sampled_chat(tokens: Iterable[tuple[str, str]], logprobs: Iterable[str]) -> str:
    """Write the logprobs of a chat without candidates."""
    return _content(
        [
            f'{before}{value}{behind},"top_logprobs":[]}}'
            for (before, behind), value in zip(tokens, logprobs, strict=True)
        ]
    )


def generated(positions: Iterable[Sequence[tuple[int, str, Any]]], most: int | None) -> str:
    """Write the logprobs of `/inference/v1/generate`, with `most` candidates each.

    `positions`: tokens as id, logprob and rank (0: none), the sampled one first.
    """
    rows = []
    for position in positions:
        written = [
            f'{{"token_id":{token},"logprob":{value},"rank":{rank or "null"}'
            for token, value, rank in position
        ]
        best = "},".join(written[:most])
        rows.append(f'{written[0]},"top_logprobs":[{best}{"}" if best else ""}]}}')
    return _content(rows)


def sampled_generated(positions: Iterable[tuple[int, str, Any]]) -> str:
    """Write the same of positions whose only candidate is the sampled token."""
    tokens = [
        f'{{"token_id":{token},"logprob":{value},"rank":{rank or "null"}' for token, value, rank in positions
    ]
    return _content([f'{token},"top_logprobs":[{token}}}]}}' for token in tokens])


def _content(rows: list[str]) -> str:
    return f'{{"content":[{",".join(rows)}]}}'
