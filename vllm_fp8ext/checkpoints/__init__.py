# SPDX-License-Identifier: Apache-2.0
"""Two checkpoints of one tiny addition model, and the problems that tell them apart.

`EARLY` and `LATE` are Hugging Face model folders written by one run of `examples/tiny/train.py`: `EARLY`
answers fewer than half of the held-out problems, `LATE` almost all of them. Importing this needs the standard
library only.
"""

import random
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

EARLY = Path(__file__).parent / "early"
"""Folder of the checkpoint taken in the middle of the run."""

LATE = Path(__file__).parent / "late"
"""Folder of the checkpoint at the end of the run."""

DIGITS = 3
"""Digits of an operand; it is padded with zeros to this width."""

MAX_PROBLEMS = 10_000
"""The most problems that `problems` hands out at once."""

_HOLD_OUT_ONE_IN = 20


@dataclass(frozen=True, slots=True)
class AdditionProblem:
    """The sum of two operands, as the model reads and writes it."""

    a: int
    b: int

    @property
    def prompt(self) -> str:
        """Return the model's prompt: `007+456=` for 7 + 456."""
        return f"{self.a:0{DIGITS}d}+{self.b:0{DIGITS}d}="

    @property
    def answer(self) -> str:
        """The completion before end-of-sequence, lowest digit first: `3640` for 463."""
        return f"{self.a + self.b:0{DIGITS + 1}d}"[::-1]


def held_out(a: int, b: int) -> bool:
    """Return whether a pair, in either order, is kept out of training (one in twenty)."""
    digest = sha256(f"{min(a, b)}+{max(a, b)}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % _HOLD_OUT_ONE_IN == 0


def problems(count: int, seed: int = 0) -> list[AdditionProblem]:
    """`count` distinct problems that training never saw; the same ones for the same `seed`."""
    if not 0 <= count <= MAX_PROBLEMS:
        raise ValueError(f"count must be between 0 and {MAX_PROBLEMS}, not {count}")
    rng = random.Random(seed)
    chosen: dict[AdditionProblem, None] = {}
    while len(chosen) < count:
        a, b = rng.randrange(10**DIGITS), rng.randrange(10**DIGITS)
        if held_out(a, b):
            chosen[AdditionProblem(a, b)] = None
    return list(chosen)
