# SPDX-License-Identifier: Apache-2.0
"""Prompts in a file, one a line: token ids, or text for the model's own tokenizer."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MOST = 64
"""As `kv_scales` takes them."""


def read_prompts(file: Path, tokenize: Callable[[str], list[int]], tokens: int) -> list[list[int]]:
    """Token ids of a file's prompts, as many as have `tokens` in all.

    A line is `1 2 3`, JSON (`[1, 2, 3]` or `"text"`), or a JSON object with one of these under `prompt_token_ids` or
    `prompt`. Empty lines count for nothing.

    Raises:
        ValueError: no prompt, a line that is none, or so short prompts that `MOST` of them do not have enough tokens.
    """
    prompts: list[list[int]] = []
    for number, line in _lines(file):
        left = tokens - sum(map(len, prompts))
        if left <= 0:
            return prompts
        if len(prompts) == MOST:
            raise ValueError(
                f"{file}: expected {tokens} tokens in at most {MOST} prompts, found {tokens - left} in the first {MOST}; "
                f"join short prompts, or ask for --tokens {tokens - left}"
            )
        ids = _ids(line, tokenize)
        if not ids:
            raise ValueError(
                f"{file}:{number}: expected token ids, such as 1 2 3 or [1, 2, 3], or text as a JSON string or "
                f'{{"prompt": "…"}}, found {line[:80]}'
            )
        prompts.append(ids[:left])
    if not prompts:
        raise ValueError(f"{file}: expected a prompt a line, found none")
    return prompts


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    with file.open(encoding="utf-8") as reader:
        yield from ((number, line.strip()) for number, line in enumerate(reader, 1) if line.strip())


def _ids(line: str, tokenize: Callable[[str], list[int]]) -> list[int] | None:
    words = line.split()
    if all(word.isdecimal() for word in words):
        return [int(word) for word in words]
    try:
        value: Any = json.loads(line)
    except ValueError:
        return None
    if isinstance(value, dict):
        value = value.get("prompt_token_ids", value.get("prompt"))
    if isinstance(value, str):
        return tokenize(value)
    if isinstance(value, list) and all(type(id) is int and id >= 0 for id in value):
        return value
    return None
