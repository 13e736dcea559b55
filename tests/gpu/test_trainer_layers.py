# SPDX-License-Identifier: Apache-2.0
"""FP8 layers of a trainer on a Hopper GPU, against the same layer on the CPU."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from vllm_fp8ext.trainer.block_product import multiply, quantize_blocks, quantize_rows
from vllm_fp8ext.trainer.linear import BlockFp8Linear
from vllm_fp8ext.trainer.recipes import BlockScaling, CurrentScaling, DelayedScaling
from vllm_fp8ext.trainer.tensor_linear import TensorFp8Linear

pytestmark = pytest.mark.gpu


RECIPES = {
    "delayed": DelayedScaling(),
    "current": CurrentScaling(),
    "e4m3": CurrentScaling(formats="e4m3"),
}


def relative(value: torch.Tensor, expected: torch.Tensor) -> float:
    return float((value.cpu().double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("gemm", ["auto", "triton", "reference"])
@pytest.mark.parametrize("backward", ["e4m3", "e5m2", "bf16"])
@pytest.mark.parametrize("shape", [(300, 512, 384), (128, 192, 256), (77, 100, 200)], ids=str)
def test_passes_are_those_of_the_cpu(gemm: Any, backward: Any, shape: tuple[int, int, int]) -> None:
    tokens, rows, columns = shape
    recipe = BlockScaling(backward=backward, gemm=gemm)
    compare(BlockFp8Linear(columns, rows, recipe=recipe, dtype=torch.bfloat16), tokens)


def test_products_in_fp32_are_not_rounded_to_bf16() -> None:
    """Gradients of weights in fp32; DeepGEMM's results are BF16."""
    x = torch.randn(256, 512, device="cuda")
    weight = quantize_blocks(torch.randn(128, 512, device="cuda"), "fp32")
    quantized = quantize_rows(x.bfloat16(), "fp32")
    out = multiply(quantized, weight, torch.float32)
    assert not torch.equal(out, out.bfloat16().float())
    assert relative(out, multiply(quantized, weight, torch.float32, "reference").cpu()) < 1e-5


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("tokens", [300, 77])
def test_one_scale_per_tensor(recipe: CurrentScaling, tokens: int) -> None:
    compare(TensorFp8Linear(208, 144, recipe=recipe, dtype=torch.bfloat16), tokens)


def compare(there: nn.Linear, tokens: int) -> None:
    """Hold a layer's output and gradients on the GPU to those of the CPU."""
    torch.manual_seed(0)
    here = copy.deepcopy(there).cuda()
    x = torch.randn(tokens, there.in_features, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(tokens, there.out_features, dtype=torch.bfloat16)
    x_here = x.detach().cuda().requires_grad_()
    expected, out = there(x), here(x_here)
    assert relative(out.detach(), expected.detach()) < 4e-3, "one rounding to BF16"
    wanted = torch.autograd.grad(expected, (x, there.weight, there.bias), dy)
    found = torch.autograd.grad(out, (x_here, here.weight, here.bias), dy.cuda())
    for one, other in zip(found, wanted, strict=True):
        assert relative(one, other) < 8e-3, "two roundings to BF16"
