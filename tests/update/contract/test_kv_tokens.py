# SPDX-License-Identifier: Apache-2.0
"""Which tokens are looked at."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_fp8ext.kv_settings import KvScaleSettings
from vllm_fp8ext.update.contract.kv_tokens import ENOUGH, PROMPT_TOKENS, Tokens, built_in, choose

VOCABULARY, LONGEST = 100, 2000
OWN = [[1, 2, 3], [4]]
RECENT = [[7] * 60, [8] * 60]


def chosen(
    asked: list[list[int]] | None = None, recent: list[list[int]] | None = None, **settings: object
) -> Tokens:
    return choose(
        asked,
        KvScaleSettings.model_validate({"policy": "calibrate", "tokens": 400, **settings}),
        recent or [],
        VOCABULARY,
        LONGEST,
    )


def test_an_updates_own_come_first() -> None:
    result = chosen(OWN, RECENT, prompts=[[5]])
    assert (result.prompts, result.source, result.count) == (OWN, "update", 4)


def test_then_those_of_the_settings() -> None:
    assert chosen(None, RECENT, prompts=[[5, 6]]) == Tokens([[5, 6]], "settings")


def test_then_what_was_served_last() -> None:
    assert chosen(None, RECENT) == Tokens(RECENT, "recent")


def test_an_eighth_of_them_is_enough() -> None:
    least = 400 // ENOUGH
    assert chosen(None, [[7] * least]).source == "recent"
    assert chosen(None, [[7] * (least - 1)]).source == "built-in"


def test_the_newest_have_their_say_and_no_prompt_takes_it_all() -> None:
    recent = [[1] * 1500, [2] * 1500, [3] * 1500]
    result = chosen(None, recent, tokens=1500)
    assert [(prompt[0], len(prompt)) for prompt in result.prompts] == [(1, PROMPT_TOKENS), (2, 476)]
    assert result.count == 1500


def test_no_prompt_is_longer_than_the_model_takes() -> None:
    settings = KvScaleSettings(policy="calibrate", tokens=64)
    for tokens in (
        choose(None, settings, [[1] * 50], VOCABULARY, 9),
        choose(None, settings, [], VOCABULARY, 9),
    ):
        assert max(map(len, tokens.prompts)) <= 9


@given(st.integers(16, 5000), st.integers(2, 200_000), st.integers(1, 5000))
def test_the_built_in_sample(tokens: int, vocabulary: int, longest: int) -> None:
    prompts = built_in(tokens, vocabulary, longest)
    ids = [token for prompt in prompts for token in prompt]
    assert len(ids) == tokens
    assert 0 <= min(ids) <= max(ids) < vocabulary
    assert 1 <= min(map(len, prompts)) <= max(map(len, prompts)) <= min(longest, PROMPT_TOKENS)
    assert prompts == built_in(tokens, vocabulary, longest)


def test_the_built_in_sample_is_from_all_over_the_vocabulary() -> None:
    [ids] = built_in(1000, 128_000, 1000)
    assert len(set(ids)) == 1000
    assert len({token // 12_800 for token in ids}) == 10


@pytest.mark.parametrize("asked", [None, OWN])
def test_the_same_every_time(asked: list[list[int]] | None) -> None:
    assert chosen(asked, RECENT) == chosen(asked, RECENT)
