# SPDX-License-Identifier: Apache-2.0
"""Output layers by each setting of `lm_head`, tied and not, on one rank and on two: what logits are, and what updates do."""

from pathlib import Path

import pytest
from head_facts import check

from .scenarios import run_scenario

CASES = [
    ("untied", "blockfp8", 1),
    ("untied", "blockfp8", 2),
    ("tied", "blockfp8", 2),
    ("serialized", "blockfp8", 1),
    ("untied", "fp32", 1),
    ("tied", "fp32", 2),
]


@pytest.mark.full
@pytest.mark.parametrize(("ties", "head", "ranks"), CASES)
def test_logits_are_those_of_the_setting_and_follow_updates(
    tmp_path: Path, ties: str, head: str, ranks: int
) -> None:
    facts = run_scenario("head_scenario.py", tmp_path, ties, head, str(ranks), seconds=560)
    check(facts, ties, head, furthest=0.0)
