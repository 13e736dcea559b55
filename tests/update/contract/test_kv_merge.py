# SPDX-License-Identifier: Apache-2.0
"""The largest of what ranks say."""

import math

from vllm_fp8ext.update.contract.kv_merge import largest, remembered


def merged(*parts: list[float | None]) -> list[float]:
    return largest([{"a": {"k": part}} for part in parts])["a"]["k"]


def test_it_is_taken_element_by_element() -> None:
    assert merged([1.0, 5.0], [3.0, 2.0]) == [3.0, 5.0]


def test_heads_of_others_do_not_count() -> None:
    assert merged([1.0, None], [None, 0.5]) == [1.0, 0.5]
    assert merged([None], [None]) == [0.0]


def test_what_is_no_number_is_the_largest() -> None:
    """Whatever its place: a comparison with NaN is always false."""
    for parts in ([[math.nan], [1.0]], [[1.0], [math.nan]], [[math.inf], [1.0]]):
        assert merged(*parts) == [math.inf]


def test_of_commits_one_that_was_not_finite_says_nothing() -> None:
    def of(*commits: float) -> list[float]:
        return remembered([{"a": {"k": [commit]}} for commit in commits])["a"]["k"]

    assert of(1.0, math.inf, 3.0, math.nan) == [3.0]
    assert of(math.nan) == of(math.inf, math.nan) == [math.inf]


def test_layers_and_kinds_stay_apart() -> None:
    one = {"a": {"k": [1.0], "v": [2.0]}, "b": {"k": [3.0], "v": [4.0]}}
    other = {"b": {"v": [1.0], "k": [9.0]}, "a": {"v": [8.0], "k": [0.0]}}
    assert largest([one, other]) == {"a": {"k": [1.0], "v": [8.0]}, "b": {"k": [9.0], "v": [4.0]}}
    assert largest([{}, {}]) == {}


def test_pipeline_stages_have_layers_of_their_own() -> None:
    assert largest([{"a": {"k": [1.0]}}, {"b": {"k": [2.0]}}, {"b": {"k": [3.0]}}]) == {
        "a": {"k": [1.0]},
        "b": {"k": [3.0]},
    }
