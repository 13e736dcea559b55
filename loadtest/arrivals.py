# SPDX-License-Identifier: Apache-2.0
"""When an open loop sends: fixed beforehand, so that a slow server can't slow down what it is asked."""

import itertools
import random
from collections.abc import Iterator


def timetable(kind: str, rate: float, seed: str) -> Iterator[float]:
    """Seconds from the start, without end. `constant`: evenly apart; `poisson`: a Poisson process of `rate` per second."""
    if rate <= 0:
        raise ValueError(f"rate: expected requests per second above 0, found {rate}")
    if kind == "constant":
        yield from (n / rate for n in itertools.count())
    elif kind == "poisson":
        source = random.Random(f"arrivals {seed}")
        at = 0.0
        while True:
            at += source.expovariate(rate)
            yield at
    else:
        raise ValueError(f"arrivals: expected constant or poisson, found {kind!r}")
