# SPDX-License-Identifier: Apache-2.0
"""Commits that fall into prompts of many steps: one version then means that version."""

from itertools import pairwise
from typing import Any

import pytest

from .scenarios import SECONDS, run_scenario

pytestmark = [pytest.mark.full, pytest.mark.timeout(SECONDS + 60)]
RESTARTS = 2
TOKENS = 4
NATS = 1.0
"""How far log-probabilities of one version may be apart in other batches: those of different versions are 10 and more."""


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `prefill_scenario` saw."""
    result: dict[str, Any] = run_scenario(
        "prefill_scenario.py", tmp_path_factory.mktemp("prefill"), seconds=SECONDS
    )
    return result


def _furthest(actual: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest difference between the log-probabilities of two requests' prompts, where both have some."""
    return max(abs(a - b) for a, b in zip(actual["logprobs"], expected["logprobs"], strict=False))


def test_versions_differ(facts: dict[str, Any]) -> None:
    for one, other in zip(facts["late"], facts["epoch-0"], strict=True):
        assert _furthest(one, other) > 10 * NATS


def test_a_prompt_that_meets_a_commit_is_of_the_version_that_it_names(facts: dict[str, Any]) -> None:
    """Its tokens, and the log-probabilities of its prompt."""
    alone = 0
    for number, each in enumerate(facts["once"]):
        [choice] = each["choices"]
        if len(choice["spans"]) > 1:
            continue  # the commit came after its first token
        [[version, start, end]] = choice["spans"]
        expected = facts[version][number]
        alone += choice["epochs"] == [each["before"] + 1]
        assert (start, end) == (0, TOKENS)
        assert choice["tokens"] == expected["tokens"]
        assert _furthest(choice, expected) < NATS
    assert alone >= 3, "else nothing was tried"


def test_a_prompt_that_meets_many_commits_begins_again_twice_and_then_tells_of_all(
    facts: dict[str, Any],
) -> None:
    assert max(len(choice["spans"]) for each in facts["often"] for choice in each["choices"]) > 1
    for commits, each in enumerate(facts["often"], 1):
        [choice] = each["choices"]
        first, last = each["before"] + min(RESTARTS, commits), each["before"] + commits
        assert set(choice["epochs"]) <= set(range(first, last + 1))
        assert len(choice["epochs"]) == 1 or commits > RESTARTS
        assert all(one < other for one, other in pairwise(choice["epochs"]))
        *held, own = [span[1:] for span in choice["spans"]]
        assert (held, own) == ([[0, 0]] * len(held), [0, TOKENS])


def test_each_choice_of_a_request_begins_again(facts: dict[str, Any]) -> None:
    for choice in facts["two choices"]["choices"]:
        [[version, *_]] = choice["spans"]
        assert choice["tokens"] == facts[version][0]["tokens"]


def test_what_was_found_in_the_cache_before_the_commit_is_not_used(facts: dict[str, Any]) -> None:
    [alone] = facts["cached"]
    assert alone["cached"] > 0
    [choice] = facts["cached before"]["choices"]
    [[version, *_]] = choice["spans"]
    assert choice["tokens"] == facts[version][1]["tokens"]
    assert choice["cached"] == 0


def test_a_session_that_can_t_begin_again_tells_of_both_weights(facts: dict[str, Any]) -> None:
    each = facts["session"]
    [choice] = each["choices"]
    assert [span[1:] for span in choice["spans"]] == [[0, 0], [0, TOKENS]]
    assert choice["epochs"] == [each["before"], each["before"] + 1]


def test_no_answer_beside_commits_without_a_break_names_one_version_and_is_of_two(
    facts: dict[str, Any],
) -> None:
    many_requests = facts["many_requests"]
    alone = [each for each in many_requests if len(each["spans"]) == 1]
    assert len(alone) >= 4, "else nothing was tried"
    assert len({epoch for each in many_requests for epoch in each["epochs"]}) > 10
    for each in alone:
        other = "late" if each["spans"][0][0] == "epoch-0" else "epoch-0"
        expected = facts[each["spans"][0][0]][each["prompt"]]
        assert _furthest(each, expected) < NATS < _furthest(each, facts[other][each["prompt"]])
