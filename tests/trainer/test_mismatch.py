# SPDX-License-Identifier: Apache-2.0
"""Measures of the mismatch, held to definitions, to exact values of small policies, and to what spans say."""

import logging
import math
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_fp8ext.trainer.correction import ICEPOP, Correction
from vllm_fp8ext.trainer.mismatch import (
    epochs_behind,
    log_mismatch,
    measure,
    measure_by_position,
    measure_by_weight_version,
)
from vllm_fp8ext.trainer.mismatch_plot import PANELS, plot_mismatch
from vllm_fp8ext.trainer.version_spans import WeightVersion

Batch = tuple[Tensor, Tensor, Tensor]


def batch() -> Batch:
    """Ratios of 2.5, 0.4, 1 and 6 in one sequence, of 1.5, 1.5 and two masked tokens in the other."""
    ratios = torch.tensor([[2.5, 0.4, 1.0, 6.0], [1.5, 1.5, 9.0, 9.0]], dtype=torch.float64)
    server = torch.full_like(ratios, -3.0)
    return server + ratios.log(), server, torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])


def span(version: str, start: int, end: int, epoch: int, instance: str | None = "a") -> dict[str, Any]:
    """A span as a server's answer has it."""
    return {"version": version, "start": start, "end": end, "epoch": epoch, "instance": instance}


def test_measures_are_what_they_are_defined_as() -> None:
    ratios = [2.5, 0.4, 1.0, 6.0, 1.5, 1.5]
    logarithms = [math.log(ratio) for ratio in ratios]
    weights = [min(ratio, 2.0) for ratio in ratios]
    mismatch = measure(*batch())
    assert mismatch.tokens == 6
    assert mismatch.kl_k1 == pytest.approx(-sum(logarithms) / 6)
    assert mismatch.kl_k3 == pytest.approx(
        sum(ratio - 1 - each for ratio, each in zip(ratios, logarithms, strict=True)) / 6
    )
    assert mismatch.mean_difference == pytest.approx(sum(map(abs, logarithms)) / 6)
    assert mismatch.mean_ratio == pytest.approx(sum(ratios) / 6)
    assert mismatch.largest_ratio == pytest.approx(6)
    assert mismatch.effective_sample_size == pytest.approx(
        sum(ratios) ** 2 / (6 * sum(ratio**2 for ratio in ratios))
    )
    assert mismatch.corrected_sample_size == pytest.approx(
        sum(weights) ** 2 / (6 * sum(weight**2 for weight in weights))
    )
    assert mismatch.clipped_share == pytest.approx(2 / 6)


@pytest.mark.parametrize(
    ("correction", "share"),
    [
        (ICEPOP, 2 / 6),
        (Correction(level="sequence", high=3.0), 4 / 6),
        (Correction(level="sequence", outside="mask", high=1.1), 1.0),
        (Correction(high=math.inf), 0.0),
    ],
)
def test_the_clipped_share_is_of_tokens(correction: Correction, share: float) -> None:
    mismatch = measure(*batch(), correction=correction)
    assert mismatch.clipped_share == pytest.approx(share)
    assert (mismatch.corrected_sample_size == 0) == (share == 1.0)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(-40, 0), st.floats(-40, 0)), min_size=1, max_size=8))
def test_bounds_of_measures(pairs: list[tuple[float, float]]) -> None:
    trainer, server = torch.tensor(pairs, dtype=torch.float64).T[:, None]
    mismatch = measure(trainer, server, torch.ones(1, len(pairs)))
    assert mismatch.kl_k3 >= 0
    assert 1 / len(pairs) <= mismatch.effective_sample_size + 1e-9 <= 1 + 1e-9
    assert 0 <= mismatch.corrected_sample_size <= 1
    assert mismatch.mean_ratio <= mismatch.largest_ratio * (1 + 1e-9)


def test_equal_policies_have_no_mismatch() -> None:
    logprobs, _, mask = batch()
    mismatch = measure(logprobs, logprobs, mask)
    assert (mismatch.kl_k1, mismatch.kl_k3, mismatch.mean_difference, mismatch.clipped_share) == (0, 0, 0, 0)
    assert (mismatch.mean_ratio, mismatch.largest_ratio) == (1, 1)
    assert mismatch.effective_sample_size == pytest.approx(1)
    assert mismatch.corrected_sample_size == pytest.approx(1)


def test_both_estimators_are_unbiased_and_k3_varies_less() -> None:
    """Tokens of a small policy, whose KL is summed exactly."""
    generator = torch.Generator().manual_seed(1)
    server = torch.randn(10, generator=generator, dtype=torch.float64).log_softmax(0)
    trainer = (server + 0.1 * torch.randn(10, generator=generator, dtype=torch.float64)).log_softmax(0)
    exact = (server.exp() * (server - trainer)).sum().item()
    sampled = torch.multinomial(server.exp(), 200_000, replacement=True, generator=generator)[None]
    mismatch = measure(trainer[sampled], server[sampled], torch.ones_like(sampled))
    difference = (trainer - server)[sampled]
    k1_error, k3_error = (
        (values.std() / values.numel() ** 0.5).item()
        for values in (difference, difference.expm1() - difference)
    )
    assert mismatch.kl_k1 == pytest.approx(exact, abs=5 * k1_error)
    assert mismatch.kl_k3 == pytest.approx(exact, abs=5 * k3_error)
    assert k3_error < k1_error / 5
    assert exact > 20 * k3_error, "too few tokens to tell"


def test_small_differences_are_not_lost() -> None:
    server = torch.full((1, 4), -1.0, dtype=torch.float64)
    mismatch = measure(server + 1e-9, server, torch.ones(1, 4))
    assert mismatch.kl_k3 == pytest.approx(5e-19, rel=1e-3, abs=0)


def test_positions_are_measured_apart() -> None:
    parts = measure_by_position(*batch(), edges=(0, 1, 3, 64))
    assert list(parts) == [(0, 1), (1, 3), (3, 64)]
    assert [part.tokens for part in parts.values()] == [2, 3, 1]
    assert parts[0, 1].kl_k1 == pytest.approx(-(math.log(2.5) + math.log(1.5)) / 2)
    assert parts[3, 64].largest_ratio == pytest.approx(6)
    assert list(measure_by_position(*batch(), edges=(0, 2))) == [(0, 2), (2, None)]


@pytest.mark.parametrize("edges", [(), (1, 2), (0, 2, 2), (0, 3, 1)])
def test_edges_ascend(edges: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="edges: expected positions that ascend from 0, found"):
        measure_by_position(*batch(), edges=edges)


def test_weight_versions_are_measured_apart() -> None:
    spans = [
        [span("step-0", 0, 0, 0), span("step-1", 0, 1, 1), span("step-2", 1, 4, 2)],
        [span("step-2", 0, 2, 2)],
    ]
    parts = measure_by_weight_version(*batch(), spans)
    assert list(parts) == [WeightVersion("a", 1, "step-1"), WeightVersion("a", 2, "step-2")]
    old, new = parts.values()
    assert (old.tokens, new.tokens) == (1, 5)
    assert old.largest_ratio == pytest.approx(2.5)
    assert new.kl_k1 == pytest.approx(-sum(map(math.log, (0.4, 1.0, 6.0, 1.5, 1.5))) / 5)


def test_epochs_are_of_their_instance() -> None:
    versions = [WeightVersion("a", 7, "x"), WeightVersion("a", 5, "w"), WeightVersion("b", 1, "x")]
    assert epochs_behind(versions).tolist() == [0, 2, 0]


def test_servers_without_updates_have_no_instance() -> None:
    spans = [[{"version": "v", "start": 0, "end": 4, "epoch": 0}], [span("v", 0, 2, 0, None)]]
    assert list(measure_by_weight_version(*batch(), spans)) == [WeightVersion(None, 0, "v")]


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([[span("v", 0, 4, 0)]], "expected spans of 2 sequences, found 1"),
        (
            [[span("v", 0, 5, 0)], [span("v", 0, 2, 0)]],
            r"\[0\]: expected 0 <= start <= end <= 4, found \[0, 5\)",
        ),
        (
            [[span("v", 0, 4, 0)], [span("v", 2, 1, 0)]],
            r"\[1\]: expected 0 <= start <= end <= 4, found \[2, 1\)",
        ),
        ([[{"start": 0, "end": 4}], []], r"\[0\]: expected fields version, .* found none of version, epoch"),
        (
            [[span("v", 0, 3, 0), span("w", 2, 4, 1)], [span("v", 0, 2, 0)]],
            r"spans apart, found \[2, 4\) over",
        ),
        (
            [[span("v", 0, 4, 0)], [span("v", 0, 1, 0)]],
            "found 1 tokens without, the first at sequence 1, token 1",
        ),
    ],
)
def test_spans_that_do_not_fit_are_refused(spans: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure_by_weight_version(*batch(), spans)


@pytest.mark.parametrize("function", [measure, measure_by_position, log_mismatch])
def test_bad_logprobs_are_refused(function: Any) -> None:
    trainer, server, mask = batch()
    with pytest.raises(ValueError, match="server_logprobs: expected finite logprobs"):
        function(trainer, torch.full_like(server, math.nan), mask)
    with pytest.raises(ValueError, match="mask: expected at least one token that counts, found none of 8"):
        function(trainer, server, torch.zeros_like(mask))


def logged(caplog: pytest.LogCaptureFixture, **options: Any) -> tuple[dict[str, float], list[str]]:
    """What `log_mismatch` returns, and the warnings that it gives."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "vllm.fp8ext"):
        values = log_mismatch(*batch(), **options)
    # each once: loggers of several levels may have the handler
    return values, [record.getMessage() for record in dict.fromkeys(caplog.records)]


def test_one_call_logs_all(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        logging.getLogger("vllm"), "propagate", True
    )  # vLLM, if imported, keeps its logs to itself
    written: list[dict[str, float]] = []
    spans = [[span("step-1", 0, 1, 1), span("step-2", 1, 4, 2)], [span("step-2", 0, 2, 2)]]
    values, warnings = logged(caplog, weight_versions=spans, edges=(0, 2), write=written.append)
    assert written == [values]
    assert all(isinstance(value, float) for value in values.values())
    assert {name.rpartition("/")[0] for name in values} == {
        "mismatch",
        *("mismatch/position_0_1", "mismatch/position_2_up"),
        *("mismatch/epochs_behind_0", "mismatch/epochs_behind_1"),
    }
    assert values["mismatch/kl_k3"] == measure(*batch()).kl_k3
    assert values["mismatch/epochs_behind_1/largest_ratio"] == pytest.approx(2.5)
    assert values["mismatch/position_2_up/tokens"] == 2
    [warning] = warnings
    assert "far from the trainer's" in warning
    assert "expected at most 1.00e-02" in warning


def test_the_threshold_is_the_users(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    kl = measure(*batch()).kl_k3
    assert logged(caplog, warn_kl=kl)[1] == []
    assert len(logged(caplog, warn_kl=kl * 0.999)[1]) == 1


def test_a_plot_has_all_measures() -> None:
    pytest.importorskip("plotly")
    spans = [[span("step-1", 0, 1, 1), span("step-2", 1, 4, 2)], [span("step-2", 0, 2, 2)]]
    steps = [log_mismatch(*batch(), weight_versions=spans), log_mismatch(*batch())]
    figure = plot_mismatch([{"loss": 1.0}, *steps, {"step": 9, **steps[0]}], warn_kl=0.01)
    lines = {line.name: (list(line.x), list(line.y)) for line in figure.data}
    kl = steps[0]["mismatch/kl_k3"]
    assert lines["kl_k3"] == ([1, 2, 9], [kl] * 3)
    assert lines["epochs_behind_1/kl_k3"][0] == [1, 9]
    drawn = {
        "kl_k1",
        "kl_k3",
        "effective_sample_size",
        "corrected_sample_size",
        "largest_ratio",
        "clipped_share",
    }
    assert lines.keys() == drawn | {
        f"{part}/kl_k3" for part in ("position_0_63", "epochs_behind_0", "epochs_behind_1")
    }
    assert {annotation.text for annotation in figure.layout.annotations} >= set(PANELS)
    assert "kl_k3" in figure.to_html()


def test_a_plot_needs_measures() -> None:
    pytest.importorskip("plotly")
    with pytest.raises(
        ValueError, match="history: expected at least one entry with mismatch/kl_k3, found none in 1"
    ):
        plot_mismatch([{"loss": 1.0}])


def test_a_plot_needs_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.subplots", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"expected plotly, found none: pip install 'vllm-fp8ext\[loadtest\]'"
    ):
        plot_mismatch([])
