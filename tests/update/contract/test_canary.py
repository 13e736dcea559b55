# SPDX-License-Identifier: Apache-2.0
"""Which prompts an update is tried on, and what is made of what the ranks say."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_fp8ext.config import Settings
from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract.canary import (
    SAMPLE_TOKENS,
    CanarySpec,
    canary_of,
    judge,
    require_prompts_run,
)
from vllm_fp8ext.update.contract.rank_results import CanaryScore

OWN = Settings.parse({"fp8ext": {"canary": {"prompts": [[1, 2, 3]], "max_perplexity": 20.0}}})
VOCABULARY, LONGEST = 100, 8


def chosen(asked: dict[str, Any] | None, settings: Settings | None = None) -> CanarySpec:
    return canary_of(asked, settings or Settings(), VOCABULARY, LONGEST)


@given(st.integers(1, 200_000), st.integers(1, 200))
def test_the_built_in_sample_fits_every_model(vocabulary: int, longest: int) -> None:
    canary = canary_of(None, Settings(), vocabulary, longest)
    [prompt] = canary.prompts
    assert (len(prompt), canary.built_in, canary.max_perplexity) == (min(SAMPLE_TOKENS, longest), True, None)
    assert all(0 <= token < vocabulary for token in prompt)
    assert len(set(prompt)) == min(len(prompt), vocabulary)


@pytest.mark.parametrize(
    ("settings", "asked", "expected"),
    [
        (None, {"prompts": [[5, 6]]}, CanarySpec([[5, 6]])),
        (None, {"prompts": [[5, 6], [7, 8, 9]], "max_perplexity": 3.0}, CanarySpec([[5, 6], [7, 8, 9]], 3.0)),
        (None, {"prompts": [[0, 99]], "max_perplexity": None}, CanarySpec([[0, 99]])),
        (OWN, None, CanarySpec([[1, 2, 3]], 20.0)),
        (OWN, {"prompts": None, "max_perplexity": None}, CanarySpec([[1, 2, 3]], 20.0)),
        (OWN, {"max_perplexity": 5.0}, CanarySpec([[1, 2, 3]], 5.0)),
        (OWN, {"prompts": [[5, 6]]}, CanarySpec([[5, 6]], 20.0)),
        (OWN, {"prompts": [[5, 6]], "max_perplexity": 9.0}, CanarySpec([[5, 6]], 9.0)),
    ],
)
def test_what_is_asked_for_overrides_the_servers_own(
    settings: Settings | None, asked: dict[str, Any] | None, expected: CanarySpec
) -> None:
    assert chosen(asked, settings) == expected


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"max_perplexity": 5.0}, "max_perplexity needs prompts"),
        ({"prompts": [[1, 2], [3]]}, "prompt 1: expected 2 to 8 tokens, found 1"),
        ({"prompts": [[]]}, "prompt 0: expected 2 to 8 tokens, found 0"),
        ({"prompts": [[1] * 9]}, "prompt 0: expected 2 to 8 tokens, found 9"),
        ({"prompts": [[1, 100]]}, "prompt 0: expected token ids below 100, found 100"),
        ({"prompts": [[1, 2], [3, -1]]}, "prompt 1: expected token ids below 100, found -1"),
    ],
)
def test_a_canary_that_cannot_sing_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(UpdateError, match=message) as caught:
        chosen(asked)
    assert (caught.value.kind, caught.value.status) == ("invalid-request", 422)


def test_the_longest_prompts_are_taken() -> None:
    assert chosen({"prompts": [[1] * LONGEST]}).prompts == [[1] * LONGEST]


def result(logprob: float = 0.0, tokens: int = 0, finite: bool = True) -> CanaryScore:
    return CanaryScore(logprob=logprob, tokens=tokens, finite=finite)


PROMPTS = [[1, 2, 3]]


@pytest.mark.parametrize("silent", [[], [result()]], ids=["one rank", "a rank without logits"])
def test_perplexity_is_that_of_a_rank_with_logits(silent: list[CanaryScore]) -> None:
    scored = result(-2 * math.log(7.0), 2)
    for results in ([scored, *silent], [*silent, scored], [scored, scored, *silent]):
        assert judge(CanarySpec(PROMPTS), results) == pytest.approx(7.0)


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize(
    "canary", [CanarySpec(PROMPTS), CanarySpec(PROMPTS, built_in=True)], ids=["asked", "built in"]
)
def test_one_rank_that_is_not_finite_refuses(canary: CanarySpec, bad: int) -> None:
    """Also a rank whose logits went elsewhere, and also when the others' perplexity is good."""
    results = [result(-1.0, 2), result()]
    results[bad] = replace(results[bad], finite=False)
    with pytest.raises(UpdateError) as caught:
        judge(canary, results)
    assert (caught.value.kind, caught.value.status) == ("canary-refused", 422)
    assert caught.value.details == {"reason": "non-finite"}


def test_a_perplexity_above_the_bound_refuses() -> None:
    results = [result(-2 * math.log(7.0), 2)]
    assert judge(CanarySpec(PROMPTS, 7.01), results) == pytest.approx(7.0)
    with pytest.raises(UpdateError, match=r"perplexity 7 .* at most 6\.99") as caught:
        judge(CanarySpec(PROMPTS, 6.99), results)
    assert (caught.value.kind, caught.value.status) == ("canary-refused", 422)
    assert caught.value.details["reason"] == "perplexity"
    assert caught.value.details["expected"] == 6.99
    assert caught.value.details["found"] == pytest.approx(7.0)


def test_the_built_in_sample_has_no_perplexity() -> None:
    assert judge(CanarySpec(PROMPTS, built_in=True), [result(-1e9, 2)]) is None


@pytest.mark.parametrize("logprob", [-1e300, -math.inf])
def test_a_hopeless_perplexity_is_a_number_all_the_same(logprob: float) -> None:
    actual = judge(CanarySpec(PROMPTS), [result(logprob, 2)])
    assert actual is not None
    assert math.isfinite(actual)
    with pytest.raises(UpdateError):
        judge(CanarySpec(PROMPTS, 1e9), [result(logprob, 2)])


def test_prompts_are_refused_where_none_can_be_scored() -> None:
    require_prompts_run(CanarySpec([[1, 2]]), ())
    require_prompts_run(CanarySpec([[1, 2]], built_in=True), ["MambaMixer"])
    with pytest.raises(
        UpdateError, match="can't be scored on new weights of this model, because of its MambaMixer"
    ) as error:
        require_prompts_run(CanarySpec([[1, 2]]), ["MambaMixer"])
    assert (error.value.kind, error.value.status) == ("canary-unavailable", 422)
    assert error.value.details["layers"] == ["MambaMixer"]


def test_weights_that_are_finite_alone_have_no_perplexity() -> None:
    assert judge(CanarySpec([[1, 2]], built_in=True), [CanaryScore(), CanaryScore()]) is None
    with pytest.raises(UpdateError, match="not finite"):
        judge(CanarySpec([[1, 2]], built_in=True), [CanaryScore(), CanaryScore(finite=False)])
