# SPDX-License-Identifier: Apache-2.0
"""Output layers by each setting of `lm_head` on a GPU, where CUDA graphs sample."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from head_facts import check

pytestmark = pytest.mark.gpu

SCENARIO = Path(__file__).parents[1] / "e2e" / "head_scenario.py"
FURTHEST = 1e-3
"""That log-probabilities of the same weights may be apart."""


@pytest.mark.parametrize("head", ["fp32", "blockfp8"])
@pytest.mark.parametrize("ties", ["tied", "untied"])
def test_logits_are_those_of_the_setting_and_follow_updates(tmp_path: Path, ties: str, head: str) -> None:
    facts, log = tmp_path / "facts.json", tmp_path / "log"
    with log.open("wb") as file:
        line = [sys.executable, "-P", str(SCENARIO), str(facts), ties, head, "1"]
        done = subprocess.run(line, stdout=file, stderr=subprocess.STDOUT, timeout=560)
    assert done.returncode == 0, log.read_text(errors="replace")[-6000:]
    check(json.loads(facts.read_text()), ties, head, furthest=FURTHEST)
