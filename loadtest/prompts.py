# SPDX-License-Identifier: Apache-2.0
"""Prompts and lengths, the same for the same seed."""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

FIRST_TOKEN = 10
"""Ids below are often special tokens."""
_WORDS = "the of weight token step value answer number sum first last next new old long short few many other"


@dataclass(frozen=True)
class Lengths:
    """A distribution of token counts.

    `512`: always. `uniform:16,64`: bounds included. `lognormal:400,1.0,20000`: median, sigma of the logarithm, largest;
    about what chats and long-tailed reasoning look like.
    """

    kind: str
    values: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Raises `ValueError` naming what is valid."""
        kind, _, rest = text.rpartition(":")
        try:
            values = tuple(float(part) for part in rest.split(","))
        except ValueError:
            values = ()
        count = {"": 1, "uniform": 2, "lognormal": 3}.get(kind)
        if count is None or len(values) != count or min(values) <= 0 or values[0] < 1:
            raise ValueError(
                f"lengths: expected N, uniform:LOW,HIGH or lognormal:MEDIAN,SIGMA,LARGEST, found {text!r}"
            )
        if kind == "uniform" and values[1] < values[0]:
            raise ValueError(f"lengths: expected LOW <= HIGH, found {text!r}")
        return cls(kind, values)

    def draw(self, source: random.Random) -> int:
        """One length."""
        if self.kind == "uniform":
            return source.randint(int(self.values[0]), int(self.values[1]))
        if self.kind == "lognormal":
            median, sigma, largest = self.values
            return int(max(1.0, min(largest, median * source.lognormvariate(0.0, sigma))))
        return int(self.values[0])


@dataclass(frozen=True)
class Prompt:
    """One request's prompt and length."""

    token_ids: tuple[int, ...]
    max_tokens: int

    @property
    def text(self) -> str:
        """The same number of words, where a server takes no token ids (chat)."""
        words = _WORDS.split()
        return " ".join(words[id % len(words)] for id in self.token_ids)


@dataclass(frozen=True)
class Shared:
    """Groups of prompts that begin alike: `GROUPSxTOKENS`."""

    groups: int
    tokens: int

    @classmethod
    def parse(cls, text: str) -> "Shared":
        """Raises `ValueError` naming what is valid."""
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
        if not match:
            raise ValueError(f"shared prefixes: expected GROUPSxTOKENS, such as 8x512, found {text!r}")
        return cls(int(match[1]), int(match[2]))


def prompts(
    seed: str, inputs: Lengths, outputs: Lengths, vocabulary: int, shared: Shared | None = None
) -> Iterator[Prompt]:
    """Prompts without end. `shared`: prefixes of groups come before the drawn lengths."""
    source = random.Random(f"prompts {seed}")
    prefixes = []
    if shared is not None:
        common = random.Random(f"prefixes {shared.groups}x{shared.tokens}")
        prefixes = [_ids(common, shared.tokens, vocabulary) for _ in range(shared.groups)]
    while True:
        prefix = source.choice(prefixes) if prefixes else ()
        ids = prefix + _ids(source, inputs.draw(source), vocabulary)
        yield Prompt(ids, outputs.draw(source))


def _ids(source: random.Random, count: int, vocabulary: int) -> tuple[int, ...]:
    return tuple(source.choices(range(FIRST_TOKEN, vocabulary), k=count))
