# SPDX-License-Identifier: Apache-2.0
"""What surrounds vLLM's grouped GEMMs, which run on a GPU alone (`tests/gpu/test_experts.py`): here what they compute, in
torch, takes their place, and reads what it is given as they do."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton, which the CPU build does not bring")
from vllm_fp8ext.kernels.moe.expert_configs import ExpertChoice
from vllm_fp8ext.kernels.moe.expert_error import experts_error
from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.numerics.quantized import Quantized
from vllm_fp8ext.kernels.testing import hard_cases
from vllm_fp8ext.layers import expert_gemm
from vllm_fp8ext.layers.expert_gemm import ExpertWeights, compute

ALIGN = 128
TILE = {"BLOCK_SIZE_M": 16}


def product(x: Quantized, rows: Any, codes: Tensor, scales: Tensor, expert: int) -> Tensor:
    values = reference.dequantize_activation(x.codes[rows], x.scales[rows].contiguous())
    return (values @ reference.dequantize_weight(codes[expert], scales[expert]).T).bfloat16()


def grouped(x: Quantized, codes: Tensor, scales: Tensor, ends_E: Tensor) -> Tensor:
    """Each expert's rows begin at the next multiple of `ALIGN`; the others stay what they are."""
    out = torch.full((x.codes.shape[0], codes.shape[1]), torch.nan, dtype=torch.bfloat16)
    start = 0
    for expert, end in enumerate(ends_E.tolist()):
        start = -(-start // ALIGN) * ALIGN
        out[start:end] = product(x, slice(start, end), codes, scales, expert)
        start = end
    return out


def by_slot(
    x: Quantized,
    codes: Tensor,
    scales: Tensor,
    out: Tensor,
    slots: Tensor,
    owners: Tensor,
    used: Tensor,
    each: int,
    config: dict[str, int],
) -> None:
    """Blocks of slots that belong to one expert; a slot beyond the tokens is none, and blocks beyond `used` are not read."""
    size, tokens = config["BLOCK_SIZE_M"], x.codes.shape[0]
    flat = out.view(-1, out.shape[-1])
    for block in range(int(used) // size):
        taken = slots[block * size :][:size]
        taken = taken[taken < tokens * each].long()
        flat[taken] = product(x, taken // each, codes, scales, int(owners[block]))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("tokens", "remote", "kernel"),
    [
        pytest.param(
            *(tokens, remote, kernel),
            marks=pytest.mark.full if tokens == 70 and remote == (kernel == "triton") else (),
        )
        for tokens in (1, 5, 70)
        for remote in (False, True)
        for kernel in ("triton", "deep_gemm")
    ],
)
def test_tokens_find_their_experts_and_back(
    tokens: int, remote: bool, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.fused_moe import fused_moe

    monkeypatch.setattr(expert_gemm, "grouped", grouped)
    monkeypatch.setattr(expert_gemm, "_triton", by_slot)
    monkeypatch.setattr(expert_gemm, "alignment", lambda: ALIGN)
    monkeypatch.setattr(fused_moe, "try_get_optimal_moe_config", lambda *_, **__: TILE)
    case = hard_cases.experts(tokens, 256, 128, 6, 2, "cpu")
    of = torch.where(case.experts_MT % 2 == 1, -1, case.experts_MT) if remote else case.experts_MT
    weights = ExpertWeights(*case[1:5])
    operands = case.x_MK, weights, case.weights_MT, of, "silu", "fp32"
    out = compute(ExpertChoice(kernel, None), *operands)
    assert experts_error(out, case.x_MK, *weights, case.weights_MT, of, "silu", "fp32") < 1
    assert torch.equal(out[(of < 0).all(1)], torch.zeros_like(out[(of < 0).all(1)]))


def test_no_tokens() -> None:
    case = hard_cases.experts(1, 256, 128, 4, 2, "cpu")
    none = (case.x_MK[:0], ExpertWeights(*case[1:5]), case.weights_MT[:0], case.experts_MT[:0])
    assert compute(ExpertChoice("triton", None), *none, "silu", "fp32").shape == (0, 256)
