# SPDX-License-Identifier: Apache-2.0
"""Runs of reinforcement learning begin where FP8 codes follow the weights."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from vllm_fp8ext.checkpoints import EARLY
from vllm_fp8ext.demo.off_grid import MANTISSA_BITS, off_grid, write_start
from vllm_fp8ext.kernels.numerics import reference


def served_step(weight: torch.Tensor, scale_format: reference.ScaleFormat) -> float:
    """Share of an optimizer's step, 1e-4 up or down for each weight, that reaches what the server multiplies."""
    torch.manual_seed(0)
    step = torch.randn(weight.shape).sign() * 1e-4
    before, after = (
        reference.dequantize_weight(*reference.quantize_weight(values.bfloat16(), scale_format))
        for values in (weight, weight.float() + step)
    )
    return float(((after - before) * step).sum() / step.square().sum())


def test_steps_reach_the_codes(tmp_path: Path) -> None:
    start = load_file(write_start(tmp_path / "start") / "model.safetensors")
    early = load_file(EARLY / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    assert served_step(early[name], "pow2") < 0.2
    assert served_step(start[name], "pow2") > 0.8
    assert served_step(start[name], "fp32") > 0.8
    assert start.keys() == early.keys()
    for key, weight in early.items():
        assert torch.allclose(start[key].float(), weight.float(), rtol=2.0**-MANTISSA_BITS, atol=0)
    assert torch.equal(start["model.norm.weight"], early["model.norm.weight"])


def test_the_start_is_the_same_each_time(tmp_path: Path) -> None:
    first, second = (write_start(tmp_path / name) / "model.safetensors" for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()


def test_zeros_stay() -> None:
    assert off_grid(torch.zeros(2, 3), torch.Generator().manual_seed(0)).tolist() == [[0.0] * 3] * 2
