# SPDX-License-Identifier: Apache-2.0
"""Output layers by each setting of `lm_head`, tied and not, on one rank and on two: what logits are, and what updates do."""

from pathlib import Path

import pytest

from .scenarios import run_scenario

CASES = [
    ("untied", "blockfp8", 1),
    ("untied", "blockfp8", 2),
    ("tied", "blockfp8", 2),
    ("untied", "fp32", 1),
    ("tied", "fp32", 2),
]
NEAR = {"bf16": 0.01, "fp32": 1e-5, "blockfp8": 0.01}
"""Largest distance of logits from those of the setting, as a share of the largest: a rounding to BF16, or an fp32 sum in
another order."""


@pytest.mark.full
@pytest.mark.parametrize(("ties", "head", "ranks"), CASES)
def test_logits_are_those_of_the_setting_and_follow_updates(
    tmp_path: Path, ties: str, head: str, ranks: int
) -> None:
    facts = run_scenario("head_scenario.py", tmp_path, ties, head, str(ranks), seconds=560)
    for logits in facts["logits"]:  # of the first weights, of the pushed ones, and after a rollback
        assert logits["dtype"] == ("torch.float32" if head == "fp32" else "torch.bfloat16")
        distances = logits["distances"]
        assert distances[head] < NEAR[head]
        assert all(distances[other] > 2 * distances[head] for other in distances.keys() - {head})
    assert set(facts["quantized"]) == {ties == "untied" and head == "blockfp8"}
    assert facts["cold"]
    assert facts["pushed"]
    assert facts["rolled back"] == [True, True]
    assert facts["verified"]
    assert facts["as after a cold start"] == [True, True]
    assert facts["others than before"]
