# SPDX-License-Identifier: Apache-2.0
"""Commands that measure the trainer kit, on models of a moment."""

import argparse
import itertools

import pytest
import torch
from program_modules import module_of
from torch import nn


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(16, 128), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 16))


def test_every_variant_trains() -> None:
    """On one batch: all of them lower its loss, and most of them end near BF16's."""
    module = module_of("benchmarks/low_precision_training.py")
    batch = torch.randint(16, (16, 9), generator=torch.Generator().manual_seed(0))
    losses = {}
    for variant in module.VARIANTS:
        each, optimizer = module.train(
            model(), lambda model, x: model(x[:, :-1]), itertools.repeat(batch), variant, 8
        )
        assert each[-1] < each[0] - 0.3, variant
        losses[variant] = each[-1]
        if variant == "bf16":
            errors = module.moment_errors(optimizer)
    assert all(losses[name] == pytest.approx(losses["bf16"], rel=0.1) for name in losses if name[:3] != "fp4")
    assert len(set(losses.values())) == len(losses)
    by_setting = {(*row["formats"], row["expand"]): row for row in errors}
    assert len(by_setting) == 8
    plain, expanded = (by_setting["e4m3", "e4m3", expand] for expand in (False, True))
    assert expanded["mse_update"] < plain["mse_update"]


def test_memory_and_rates_are_measured() -> None:
    module = module_of("benchmarks/coat.py")
    options = argparse.Namespace(steps=2, warmup=1, batch=2, tokens=9)
    runs = [module.measure(model(), 16, variant, options) for variant in module.VARIANTS]
    for run, peak in zip(runs, (30, 20, 24, 10), strict=True):
        run["peak_memory"] = peak  # a CPU has no such count
    count = sum(each.numel() for each in model().parameters())
    cases = {case["variant"]: case for case in module.summary(runs, count)}
    assert [case["peak_memory_ratio"] for case in cases.values()] == [1, 1.5, 1.25, 3]
    assert cases["both"]["state_ratio"] > 3.7
    assert cases["bf16"]["state_ratio"] == pytest.approx(1, rel=0.01)
    assert all(case["tokens_per_s"] > 0 for case in cases.values())


def test_layers_are_timed() -> None:
    cases = module_of("benchmarks/trainer_layers.py").measure(4, 128, 128, samples=2, passes=1, device="cpu")
    assert [(case["variant"], case["passes"]) for case in cases] == [
        (name, passes) for name in ("bf16", "block_e4m3", "block_bf16") for passes in ("forward", "both")
    ]
    assert all(len(case["samples"]) == 2 and case["ms"] > 0 for case in cases)
