# SPDX-License-Identifier: Apache-2.0
"""How long times are together."""

from hypothesis import given
from hypothesis import strategies as st

from vllm_fp8ext.update.contract.spans import Spans


def test_what_overlaps_counts_once() -> None:
    spans = Spans()
    for start, stop, seconds in ((1, 5, 4), (0, 10, 10), (12, 13, 11), (13, 14, 12), (9, 12, 14), (2, 3, 14)):
        spans.add(start, stop)
        assert spans.seconds == seconds


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20))))
def test_they_are_as_long_as_the_seconds_that_they_cover(spans: list[tuple[int, int]]) -> None:
    together = Spans()
    for start, length in spans:
        together.add(start, start + length)
    covered = {second for start, length in spans for second in range(start, start + length)}
    assert together.seconds == len(covered)
