# SPDX-License-Identifier: Apache-2.0
"""A kernel of experts that is registered is known to settings, selection, layers and warm-up: copy this for a new one."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_fp8ext.config import Settings
from vllm_fp8ext.errors import ConfigError
from vllm_fp8ext.kernels.moe.expert_configs import ExpertChoice
from vllm_fp8ext.kernels.moe.experts import reference_experts
from vllm_fp8ext.kernels.testing import hard_cases
from vllm_fp8ext.layers import expert_gemm, gemm_kernels
from vllm_fp8ext.layers.expert_gemm import ExpertWeights
from vllm_fp8ext.layers.expert_kernels import EXPERT_KERNELS, ExpertKernel


def multiply(x: Tensor, weights: ExpertWeights, *rest: Any) -> Tensor:
    *routing, activation, scale_format, _config = rest
    out = reference_experts(x, *weights, *routing, activation, scale_format)
    assert isinstance(out, Tensor)
    return out


NEW = ExpertKernel(name="new", run=multiply, supports=lambda hidden, dtype: hidden % 256 == 0)


@pytest.fixture
def new(monkeypatch: pytest.MonkeyPatch) -> ExpertKernel:
    """One that is registered before all others for a while."""
    kernels = {NEW.name: NEW, **EXPERT_KERNELS}
    for module in (gemm_kernels, expert_gemm):
        monkeypatch.setattr(module, "EXPERT_KERNELS", kernels)
    monkeypatch.setattr(expert_gemm, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    return NEW


def choose(gemm: str) -> Settings:
    return Settings.parse({"fp8ext": {"kernels": {"experts": {"gemm": gemm}}}})


def test_settings_take_it(new: ExpertKernel) -> None:
    assert choose(new.name).kernels.experts.gemm == new.name


def test_settings_refuse_what_is_not_registered() -> None:
    with pytest.raises(ConfigError, match=r"experts\.gemm: Input should be 'deep_gemm', 'triton' or 'fused'"):
        choose(NEW.name)


@pytest.mark.parametrize(("hidden", "gemm"), [(256, "new"), (320, "triton")])
def test_it_is_selected_where_it_runs(hidden: int, gemm: str, new: ExpertKernel) -> None:
    moe: Any = SimpleNamespace(in_dtype=torch.float16, num_experts=128, experts_per_token=8)
    route = expert_gemm.select(moe, hidden, Settings().kernels)
    assert route is not None
    assert (route.gemm, route.choose(8192).kernel, route.choose(1).kernel) == (gemm, gemm, "fused")


def test_a_layer_multiplies_by_it(new: ExpertKernel) -> None:
    case = hard_cases.experts(5, 256, 128, 4, 2, "cpu")
    operands = case.x_MK, ExpertWeights(*case[1:5]), case.weights_MT, case.experts_MT, "silu", "fp32"
    out = expert_gemm.compute(ExpertChoice(new.name, None), *operands)
    assert torch.equal(out, reference_experts(*case.operands))
