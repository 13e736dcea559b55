# SPDX-License-Identifier: Apache-2.0
"""Counts over the life of an engine."""

import json

import pytest

from vllm_fp8ext.update.engine.session import State
from vllm_fp8ext.update.engine.totals import Totals


def test_every_outcome_is_there_from_the_start() -> None:
    told = Totals().as_dict()
    assert told["outcomes"] == {"committed": 0, "abandoned": 0, "expired": 0, "rolled-back": 0}
    assert (told["phases"], told["stalls"], told["restarts"], told["bytes"]) == ({}, [0, 0.0], [0, 0], 0)


def test_everything_adds_up() -> None:
    totals = Totals()
    for outcome in (State.COMMITTED, State.COMMITTED, State.EXPIRED, "rolled-back"):
        totals.ended(outcome)
    totals.took({"prepare": 1.0, "pause": 0.25})
    totals.took({"pause": 0.5})
    totals.stalled(0.125)
    totals.stalled(0.25)
    totals.restarted(2, 48)
    totals.restarted(1, 16)
    totals.bytes += 7
    assert json.loads(json.dumps(totals.as_dict())) == {
        "outcomes": {"committed": 2, "abandoned": 0, "expired": 1, "rolled-back": 1},
        "phases": {"prepare": [1, 1.0], "pause": [2, 0.75]},
        "stalls": [2, 0.375],
        "restarts": [3, 64],
        "bytes": 7,
    }


def test_engines_count_for_themselves() -> None:
    Totals().ended(State.COMMITTED)
    Totals().stalled(1.0)
    assert Totals() == Totals()
    assert Totals().as_dict()["stalls"] == [0, 0.0]


@pytest.mark.parametrize("outcome", [State.OPEN, "poisoned"])
def test_an_outcome_that_is_none_is_an_error(outcome: str) -> None:
    with pytest.raises(KeyError):
        Totals().ended(outcome)
