# SPDX-License-Identifier: Apache-2.0
"""Which fingerprints are expected of which weights."""

import pytest

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract.labels import Label
from vllm_fp8ext.update.engine.verification import CommittedFingerprints

START, FIRST, BACK = Label(0, "epoch-0"), Label(1, "new"), Label(2, "epoch-0")


def test_a_rollback_brings_the_fingerprints_back() -> None:
    known = CommittedFingerprints()
    known.keep(START, [1, 2], None)
    known.keep(FIRST, [3, 4], START)
    known.require(FIRST, [3, 4])
    known.keep(BACK, known.of(START), FIRST)
    known.require(BACK, [1, 2])
    assert known.of(FIRST) == [3, 4]
    assert known.of(START) == []


@pytest.mark.parametrize(
    ("label", "fingerprints", "ranks"),
    [(START, [1, 9], [1]), (START, [9, 9], [0, 1]), (FIRST, [1, 2], [0, 1])],
)
def test_ranks_that_differ_are_named(label: Label, fingerprints: list[int], ranks: list[int]) -> None:
    known = CommittedFingerprints()
    known.keep(START, [1, 2], None)
    with pytest.raises(
        UpdateError, match=f"rank {', '.join(map(str, ranks))}: .* epoch {label.epoch}"
    ) as caught:
        known.require(label, fingerprints)
    assert (caught.value.kind, caught.value.details["ranks"]) == ("weights-differ", ranks)
