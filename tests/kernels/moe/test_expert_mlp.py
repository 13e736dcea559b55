# SPDX-License-Identifier: Apache-2.0
"""The experts' kernel for few tokens against the reference of experts.

Both round the same numbers at the same places, but add products in other orders; `experts_error` says what that can make of
the result.
"""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton, which the CPU build does not bring")
from vllm_fp8ext.kernels.moe.expert_configs import ExpertTileConfig
from vllm_fp8ext.kernels.moe.expert_error import experts_error
from vllm_fp8ext.kernels.moe.expert_mlp import expert_mlp
from vllm_fp8ext.kernels.numerics.reference import ScaleFormat
from vllm_fp8ext.kernels.testing import hard_cases


def compare(
    tokens: int,
    sizes: tuple[int, int, int, int],
    config: ExpertTileConfig,
    form: ScaleFormat,
    device: str,
    **others: object,
) -> None:
    case = hard_cases.experts(tokens, *sizes, device, scale_format=form)
    of = others.get("of")
    experts = case.experts_MT if of is None else of
    assert isinstance(experts, Tensor)
    operands = (case.x_MK, *case.operands[1:6], experts, str(others.get("activation", "silu")), form)
    out = expert_mlp(*operands, config)
    assert torch.isfinite(out).all()
    assert experts_error(out, *operands) < 1
    assert torch.equal(out, expert_mlp(*operands, config))


SMALL = (256, 128, 4, 2)
"""Hidden size, intermediate size, experts, experts of a token."""
TILE_CONFIGS = [
    ExpertTileConfig(),
    ExpertTileConfig(rows=128, down_rows=128),
    ExpertTileConfig(ahead=1),
    ExpertTileConfig(rows=128, alone=True, ahead=2),
    ExpertTileConfig(tokens=32, down_rows=128, alone=True),
]
BOTH_WAYS = (TILE_CONFIGS[0], TILE_CONFIGS[3])
"""`make test` has these: one of each way, with experts together and alone. The interpreter takes seconds."""
configs = pytest.mark.parametrize(
    "config",
    [
        pytest.param(one, marks=() if one in BOTH_WAYS else pytest.mark.full, id=str(one))
        for one in TILE_CONFIGS
    ],
)


@pytest.mark.parametrize(
    ("config", "form"),
    [
        pytest.param(*(one, form), marks=() if (form == "fp32" or one in BOTH_WAYS) else pytest.mark.full)
        for one in TILE_CONFIGS
        for form in ("fp32", "pow2")
    ],
    ids=str,
)
def test_every_tile_config(config: ExpertTileConfig, form: ScaleFormat, device: str) -> None:
    compare(3, SMALL, config, form, device)


@configs
def test_more_tokens_of_an_expert_than_a_program_takes(config: ExpertTileConfig, device: str) -> None:
    tokens = (1 if config.alone else config.tokens) + 3
    of = torch.tensor([[1, 3]], dtype=torch.int32, device=device).repeat(tokens, 1)
    compare(tokens, SMALL, config, "fp32", device, of=of)


@configs
def test_widths_that_are_no_multiples(config: ExpertTileConfig, device: str) -> None:
    compare(5, (200, 256, 3, 2), config, "fp32", device)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_other_activations(activation: str, device: str) -> None:
    compare(2, SMALL, ExpertTileConfig(rows=128), "fp32", device, activation=activation)


@configs
def test_experts_of_another_rank_add_nothing(config: ExpertTileConfig, device: str) -> None:
    of = torch.tensor([[-1, 2], [0, -1], [-1, -1]], dtype=torch.int32, device=device)
    case = hard_cases.experts(3, *SMALL, device)
    operands = (*case.operands[:6], of, "silu", "fp32")
    out = expert_mlp(*operands, config)
    assert experts_error(out, *operands) < 1
    assert not out[2].any()


def test_no_tokens(device: str) -> None:
    case = hard_cases.experts(0, *SMALL, device)
    assert expert_mlp(*case.operands, ExpertTileConfig()).shape == (0, 256)


def test_what_it_does_not_take_is_refused(device: str) -> None:
    case = hard_cases.experts(1, *SMALL, device)
    with pytest.raises(ValueError, match="parts of 64 or"):
        expert_mlp(*case.operands, ExpertTileConfig(rows=32))
