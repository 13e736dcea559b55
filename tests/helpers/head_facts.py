# SPDX-License-Identifier: Apache-2.0
"""What `e2e/head_scenario.py` must have seen, on a CPU and on a GPU."""

from typing import Any

NEAR = {"bf16": 0.01, "fp32": 1e-5, "blockfp8": 0.01}
"""Largest distance of logits from those of the setting, as a share of the largest: a rounding to BF16, or an fp32 sum in
another order."""


def check(facts: dict[str, Any], ties: str, head: str, *, furthest: float) -> None:
    """`furthest`: that log-probabilities of the same weights may be apart."""
    for logits in facts["logits"]:  # of the first weights, of the pushed ones, and after a rollback
        assert logits["dtype"] == ("torch.float32" if head == "fp32" else "torch.bfloat16")
        distances = logits["distances"]
        assert distances[head] < NEAR[head]
        assert all(distances[other] > 2 * distances[head] for other in distances.keys() - {head})
    assert set(facts["quantized"]) == {ties != "tied" and head == "blockfp8"}
    assert facts["cold"]
    assert facts["pushed"]
    assert max(facts["rolled back"]) <= furthest
    assert facts["verified"]
    assert max(facts["as after a cold start"]) <= furthest
    assert facts["others than before"]
