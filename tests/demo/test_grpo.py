# SPDX-License-Identifier: Apache-2.0
"""The demo's trainer: advantages by group, gradients towards what was rewarded, and pages of its runs."""

import math

import pytest
import torch

from vllm_fp8ext.checkpoints import EARLY
from vllm_fp8ext.demo.grpo import Policy, SampledBatch
from vllm_fp8ext.demo.rl_page import page, smoothed
from vllm_fp8ext.trainer.correction import Correction
from vllm_fp8ext.trainer.recipes import BlockScaling

PROMPT = [3, 3, 4, 13, 3, 3, 5, 14]
"""`001+002=`."""


def rollout(answers: list[list[int]], rewards: list[float], *, logprob: float = -1.0) -> SampledBatch:
    longest = max(map(len, answers))
    padded = [answer + [0] * (longest - len(answer)) for answer in answers]
    return SampledBatch(
        tokens=torch.tensor([PROMPT + answer for answer in padded]),
        server_logprobs=torch.full((len(answers), longest), logprob),
        mask=torch.tensor([[1.0] * len(answer) + [0.0] * (longest - len(answer)) for answer in answers]),
        rewards=torch.tensor(rewards),
        prompt=len(PROMPT),
        group=2,
    )


@pytest.mark.parametrize("recipe", [None, BlockScaling()], ids=["BF16", "FP8"])
def test_rewarded_answers_become_likelier(recipe: BlockScaling | None) -> None:
    policy = Policy(EARLY, rate=1e-4, recipe=recipe)
    batch = rollout([[6, 3, 3, 3, 1], [7, 3, 1]], [1.0, 0.0])
    before, entropy = policy.update(batch)
    for _ in range(2):
        policy.update(batch, before)
    after, _ = policy.logprobs(batch)
    gained = ((after - before) * batch.mask).sum(1)
    assert gained[0] > 0 > gained[1]
    assert before.shape == entropy.shape == batch.mask.shape
    assert bool((entropy >= 0).all())


def test_a_group_of_equal_rewards_teaches_nothing() -> None:
    batch = rollout([[6, 1], [7, 1], [6, 1], [7, 1]], [1.0, 1.0, 0.0, 1.0])
    assert batch.advantages()[:2].tolist() == [[0.0], [0.0]]
    assert batch.advantages()[2:].sum().item() == pytest.approx(0, abs=1e-6)
    assert batch.advantages()[3].item() == pytest.approx(1, rel=1e-3)


def test_what_the_server_found_unlikely_weighs_less_than_it_would() -> None:
    """A token that only the server's policy makes rare has a ratio above the cap."""
    moved = []
    for correction in (None, Correction()):
        policy = Policy(EARLY, rate=1e-3)
        batch = rollout([[6, 1], [7, 1]], [1.0, 0.0], logprob=-50.0)
        weights = (
            torch.ones(())
            if correction is None
            else correction.weights(policy.logprobs(batch)[0].detach(), batch.server_logprobs, batch.mask)
        )
        policy.update(batch, correction=correction)
        moved.append(weights.max().item())
    assert moved == [1.0, 2.0]


def test_logprobs_that_are_no_numbers_are_refused() -> None:
    policy = Policy(EARLY, rate=1e-3)
    kept = {name: weight.clone() for name, weight in policy.tensors().items()}
    batch = rollout([[6, 1], [7, 1]], [1.0, 0.0])
    with pytest.raises(ValueError, match="expected a number, found nan"):
        policy.update(batch, torch.full_like(batch.mask, math.nan))
    assert all(torch.equal(weight, kept[name]) for name, weight in policy.tensors().items())


def test_a_page_shows_each_variant_once() -> None:
    curves = {"reward": [0.1, 0.3], "mismatch_kl": [1e-3, 2e-3], "ess": [1.0, 0.9], "entropy": [0.5, 0.4]}
    html = page([{"variant": name, "seed": seed, **curves} for name in ("bf16", "fp8") for seed in (0, 1)])
    assert html.count('"name":"fp8"') == 4
    assert "https://cdn" not in html.partition("plotly.js")[0]
    assert smoothed([1.0, 3.0]) == [1.0, 2.0]
