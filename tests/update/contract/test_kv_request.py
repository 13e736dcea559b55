# SPDX-License-Identifier: Apache-2.0
"""What an update may ask for its scales, and what is refused."""

import math
from typing import Any

import pytest

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.kv_settings import KvScaleSettings
from vllm_fp8ext.update.contract.kv_request import KvRequest, check_prompts, kv_request_of

SERVED = {name: {"q": [1.0, 2.0], "k": [3.0, 4.0], "v": [5.0, 6.0]} for name in ("a", "b")}
BOTH = {"k": 0.5, "v": 0.25}


def asked(told: Any, policy: str = "calibrate", *, records: bool = False, **more: Any) -> KvRequest:
    settings = KvScaleSettings.model_validate({"policy": policy, "tokens": 32, **more})
    return kv_request_of(told, settings, SERVED, 100, 20, records=records)


def refused(told: Any, policy: str = "calibrate", **more: Any) -> str:
    with pytest.raises(UpdateError) as caught:
        asked(told, policy, **more)
    assert (caught.value.kind, caught.value.status) == ("invalid-request", 422)
    assert str(caught.value).startswith("kv_scales: ")
    return str(caught.value)


def test_what_an_update_does_not_say_is_as_the_server_was_started() -> None:
    for told in (None, {}, {"policy": None, "prompts": None, "scales": None, "cached": None}):
        assert asked(told) == KvRequest("calibrate", "rescale")
    assert asked(None, cached="recompute") == KvRequest("calibrate", "recompute")
    assert asked(None, "history", records=True) == KvRequest("history", "rescale")
    assert asked(None, "static") == KvRequest("static", "rescale")


def test_an_update_may_choose() -> None:
    assert asked({"policy": "static", "cached": "recompute"}) == KvRequest("static", "recompute")
    assert asked({"prompts": [[1, 2], [99]]}) == KvRequest("calibrate", "rescale", [[1, 2], [99]])
    assert asked({"policy": "calibrate"}, "provided").policy == "calibrate"


def provided(scales: Any, policy: str = "calibrate") -> Any:
    return {"policy": policy, "scales": scales}


def test_one_number_counts_for_all_heads_and_q_may_stay() -> None:
    result = asked(provided({"a": BOTH, "b": {"k": [1, 2], "v": [0.25], "q": [7.0, 8.0]}}, "provided"))
    assert result.policy == "provided"
    assert result.scales == {
        "a": {"q": [1.0, 2.0], "k": [0.5, 0.5], "v": [0.25, 0.25]},
        "b": {"q": [7.0, 8.0], "k": [1.0, 2.0], "v": [0.25, 0.25]},
    }


def test_numbers_become_what_the_device_holds() -> None:
    """So that what is told, compared and taken digests of is what is served."""
    result = asked(provided({"a": {"k": 0.1, "v": 0.1}, "b": BOTH}, "provided")).scales
    assert result is not None
    assert result["a"]["k"] == [0.10000000149011612] * 2


@pytest.mark.parametrize("policy", ["calibrate", "history", "provided"])
def test_a_static_server_stays_so(policy: str) -> None:
    """Its attention may keep the scales with which its CUDA graphs were captured."""
    told = provided({"a": BOTH, "b": BOTH}, policy) if policy == "provided" else {"policy": policy}
    assert f"found {policy}" in refused(told, "static")


def test_a_history_needs_a_recorder() -> None:
    assert "nothing is recorded" in refused({"policy": "history"})
    assert asked({"policy": "history"}, "history", records=True).policy == "history"


@pytest.mark.parametrize("policy", ["static", "provided", "history"])
def test_prompts_are_to_calibrate_with(policy: str) -> None:
    assert f"found {policy}" in refused({"policy": policy, "prompts": [[1]]}, records=True)


def test_scales_and_their_policy_go_together() -> None:
    for told in ({"scales": {"a": BOTH, "b": BOTH}}, {"policy": "provided"}):
        assert "go together" in refused(told)
    assert "go together" in refused(None, "provided")


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1], []], "prompt 1: expected 1 to 20 tokens, found 0"),
        ([[1] * 21], "prompt 0: expected 1 to 20 tokens, found 21"),
        ([[1], [2, 100]], "prompt 1: expected token ids below 100, found 100"),
        ([[-1]], "prompt 0: expected token ids below 100, found -1"),
        ([[1] * 20, [2] * 13], "expected at most 32 tokens in all, found 33"),
    ],
)
def test_prompts_that_the_model_does_not_take(prompts: list[list[int]], message: str) -> None:
    assert message in refused({"prompts": prompts})
    settings = KvScaleSettings(policy="calibrate", tokens=32)
    with pytest.raises(UpdateError, match="kv_scales: prompt"):
        check_prompts(prompts, settings, 100, 20)


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({}, "missing layers ['a', 'b'], unknown layers []"),
        ({"a": BOTH}, "missing layers ['b']"),
        ({"a": BOTH, "b": BOTH, "c": BOTH}, "unknown layers ['c']; expected ['a', 'b']"),
        ({"a": BOTH, "b": {"k": 1.0}}, "b has no v"),
        ({"a": BOTH, "b": {"v": 1.0, "k": None}}, "b has no k"),
        ({"a": BOTH, "b": {"k": [1.0, 2.0, 3.0], "v": 1.0}}, "b.k: expected 1 or 2 numbers, found 3"),
        ({"a": BOTH, "b": {"k": [], "v": 1.0}}, "b.k: expected 1 or 2 numbers, found 0"),
        ({"a": BOTH, "b": {"k": 1.0, "v": 1.0, "q": [1.0, 0.0]}}, "b.q: expected numbers from"),
    ],
)
def test_scales_that_do_not_fit_the_model(scales: Any, message: str) -> None:
    assert message in refused(provided(scales, "provided"))


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan, 1e-60, 1e-40, 1e300])
def test_numbers_that_are_no_scales(value: float) -> None:
    """Nor those that become zero, subnormal or infinite in fp32."""
    assert "a.v: expected numbers from" in refused(
        provided({"a": {"k": 1.0, "v": value}, "b": BOTH}, "provided")
    )
