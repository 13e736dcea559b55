# SPDX-License-Identifier: Apache-2.0
"""How well scales fit, by layer and at worst."""

import math

import pytest

from vllm_fp8ext.update.engine.kv_report import layer_reports, traffic_reports, worst


def sums(elements: int = 100, saturated: int = 0, error: float = 0.0, norm: float = 0.0) -> dict[str, float]:
    return {"elements": elements, "saturated": saturated, "squared_error": error, "squared_norm": norm}


ZERO = {"k": sums(), "v": sums()}


def test_sums_of_all_ranks_are_added() -> None:
    fits = [
        {"a": {"k": sums(100, 5, 9.0, 300.0), "v": sums()}},
        {"a": {"k": sums(300, 1, 0.0, 600.0), "v": sums()}},
    ]
    amax = {"a": {"k": [112.0, 448.0], "v": [1.0, 1.0]}}
    scales = {"a": {"k": [1.0, 2.0], "v": [1.0, 1.0]}}
    report = layer_reports(fits, amax, scales)["a"]
    assert report["k"] == {"saturated_fraction": 6 / 400, "relative_error": 0.1, "headroom": 1.0}
    assert report["v"]["relative_error"] == 0.0


@pytest.mark.parametrize(("amax", "headroom"), [(448.0, 0.0), (896.0, -1.0), (7.0, 6.0)])
def test_headroom_is_in_powers_of_two_to_the_largest_code(amax: float, headroom: float) -> None:
    report = layer_reports([{"a": ZERO}], {"a": {"k": [amax], "v": [1.0]}}, {"a": {"k": [1.0], "v": [1.0]}})
    assert report["a"]["k"]["headroom"] == headroom


@pytest.mark.parametrize("amax", [0.0, math.inf, 1e-45])
def test_every_number_is_finite(amax: float) -> None:
    """They are sent as JSON. Where nothing is known there is no headroom to tell."""
    empty = {"a": {"k": sums(0), "v": sums(0)}}
    report = layer_reports([empty], {"a": {"k": [amax], "v": [amax]}}, {"a": {"k": [1.0], "v": [1.0]}})
    assert all(map(math.isfinite, report["a"]["k"].values()))
    assert (report["a"]["k"]["headroom"] == 0.0) == (amax != 1e-45)


def test_a_head_of_which_nothing_was_seen_does_not_count() -> None:
    amax, scales = {"a": {"k": [0.0, 224.0], "v": [1.0]}}, {"a": {"k": [1.0, 1.0], "v": [1.0]}}
    assert layer_reports([{"a": ZERO}], amax, scales)["a"]["k"]["headroom"] == 1.0


def test_the_worst_of_each() -> None:
    def layer(saturated: float, error: float, headroom: float) -> dict[str, dict[str, float]]:
        report = {"saturated_fraction": saturated, "relative_error": error, "headroom": headroom}
        return {"k": report, "v": dict.fromkeys(report, 0.0)}

    layers = {"a": layer(0.1, 0.9, 3.0), "b": layer(0.5, 0.2, 1.0), "c": layer(0.2, 0.3, 2.0)}
    told = worst(layers)
    assert told is not None
    assert told["k"] == {
        "saturated_fraction": 0.5,
        "relative_error": 0.9,
        "headroom": 1.0,
        "worst": "b",
    }
    assert worst({}) is None


def test_of_traffic_only_layers_count_into_which_something_was_written() -> None:
    def counts(elements: int, saturated: int) -> dict[str, dict[str, int]]:
        return {kind: {"elements": elements, "saturated": saturated} for kind in ("k", "v")}

    ranks = [{"a": counts(6, 1), "b": counts(0, 0)}, {"a": counts(2, 1), "b": counts(0, 0)}]
    amax = {layer: {"k": [1792.0], "v": [224.0]} for layer in "ab"}
    ones = {layer: {"k": [1.0], "v": [1.0]} for layer in "ab"}
    assert traffic_reports(ranks, amax, ones) == {
        "a": {
            "k": {"saturated_fraction": 0.25, "headroom": -2.0},
            "v": {"saturated_fraction": 0.25, "headroom": 1.0},
        }
    }
