# SPDX-License-Identifier: Apache-2.0
"""Drafts are counted by epoch, beside what vLLM counts."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_fp8ext.compat.update import draft_acceptance
from vllm_fp8ext.compat.update.draft_acceptance import DraftCounter
from vllm_fp8ext.compat.update.drafts import unsupported_drafts


class CountingScheduler:
    """Counts drafts as vLLM does, all together."""

    def __init__(self) -> None:
        self.accepted = 0

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: Any,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> str:
        self.accepted += num_accepted_tokens
        return "stats"


def step(
    scheduler: CountingScheduler, drafted: int, accepted: int, invalid: dict[str, int] | None = None
) -> None:
    """Check a request's draft as the scheduler does."""
    assert (
        scheduler.make_spec_decoding_stats(
            None,
            num_draft_tokens=drafted,
            num_accepted_tokens=accepted,
            num_invalid_spec_tokens=invalid,
            request_id="r",
        )
        == "stats"
    )


def test_drafts_are_counted_by_epoch(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = CountingScheduler()
    drafts = DraftCounter(scheduler)
    assert drafts.describe() == {
        "served": {"epoch": 0, "drafts": 0, "draft_tokens": 0, "accepted_tokens": 0},
        "previous": None,
    }
    step(scheduler, 4, 1)
    step(scheduler, 4, 3)
    with caplog.at_level(logging.INFO, "vllm.fp8ext"):
        drafts.enter(1)
    assert "epoch 0 accepted 4 of 8 drafted tokens (50.0 %)" in caplog.text
    step(scheduler, 3, 1, {"r": 1, "other": 2})
    step(scheduler, 3, 0, {"r": 3})
    assert drafts.describe() == {
        "served": {"epoch": 1, "drafts": 1, "draft_tokens": 2, "accepted_tokens": 1},
        "previous": {"epoch": 0, "drafts": 2, "draft_tokens": 8, "accepted_tokens": 4},
    }
    assert scheduler.accepted == 5


def test_an_epoch_without_drafts_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    drafts = DraftCounter(CountingScheduler())
    with caplog.at_level(logging.INFO, "vllm.fp8ext"):
        drafts.enter(1)
    assert not caplog.records


def test_a_core_without_speculative_decoding_counts_nothing() -> None:
    core = SimpleNamespace(vllm_config=SimpleNamespace(speculative_config=None))
    draft_acceptance.attach(core)
    assert not hasattr(core, "fp8ext_draft_acceptance")


@pytest.mark.parametrize(
    ("method", "draft_weights", "quantization", "said"),
    [
        ("ngram", "refuse", None, None),
        ("suffix", "refuse", None, None),
        ("draft_model", "keep", None, None),
        (
            "draft_model",
            "refuse",
            None,
            "expected draft_weights keep, with which they stay as they were loaded",
        ),
        ("draft_model", "keep", "blockfp8", "expected a draft model in 16 bits"),
        ("eagle3", "keep", None, "it drafts from states and layers of the served model"),
        ("mtp", "keep", "blockfp8", "or method ngram or suffix"),
    ],
)
def test_methods_that_go_together_with_updates(
    method: str, draft_weights: str, quantization: str | None, said: str | None
) -> None:
    config = SimpleNamespace(method=method, quantization=quantization)
    reason = unsupported_drafts(config, draft_weights)
    assert reason is None if said is None else said in str(reason)
