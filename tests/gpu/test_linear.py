# SPDX-License-Identifier: Apache-2.0
"""The served linear layer on a Hopper GPU against the reference numerics."""

import pytest
import torch
from torch import Tensor, nn

from vllm_fp8ext.checkpoints import EARLY
from vllm_fp8ext.kernels import reference

pytestmark = pytest.mark.gpu

TENSOR_CORE = reference.BLOCK * 2.0**-13
"""Error of FP8 tensor cores over one block, relative to its largest product: each of 128 products is cut about 13 bits
below the largest one before they are added; blocks are then added in fp32 (DeepSeek-V3, arXiv 2412.19437, section 3.3.2)."""
BF16 = 2.0**-8
"""Relative rounding of the BF16 result."""
SHAPES = [(6144, 4096), (4096, 12288), (192, 256), (200, 384), (256, 200)]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory):
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(model=str(EARLY), quantization="blockfp8", max_model_len=256).create_engine_config()
    with set_current_vllm_config(config):
        rendezvous = tmp_path_factory.mktemp("rendezvous") / "store"
        init_distributed_environment(1, 0, f"file://{rendezvous}", 0)
        initialize_model_parallel(1, 1)
        yield config
        cleanup_dist_env_and_memory()


def _layer(
    config, weight: Tensor, scale_format: str, *, batch_invariant: bool = False, gemm: str | None = None
) -> tuple[nn.Module, object]:
    from vllm_fp8ext.config import KernelSettings, Settings
    from vllm_fp8ext.linear import BlockFp8LinearMethod

    torch.set_default_dtype(torch.bfloat16)
    try:
        shapes = {"*": {"gemm": gemm, "decode_tokens": 0}} if gemm else {}
        kernels = KernelSettings(batch_invariant=batch_invariant, shapes=shapes)
        method = BlockFp8LinearMethod(Settings(scale_format=scale_format, kernels=kernels))
        layer = nn.Module()
        method.create_weights(
            layer, weight.shape[1], [weight.shape[0]], weight.shape[1], weight.shape[0], torch.bfloat16
        )
    finally:
        torch.set_default_dtype(torch.float32)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    method.process_weights_after_loading(layer)
    return layer, method


@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 64, 300])
def test_linear_stays_within_the_bound(config, shape, tokens, scale_format):
    generator = torch.Generator("cuda").manual_seed(tokens)
    weight = (torch.randn(shape, generator=generator, device="cuda") * 0.05).bfloat16()
    weight[:, ::97] *= 10
    x = torch.randn(tokens, shape[1], generator=generator, device="cuda").bfloat16()
    x[:, ::61] *= 30
    layer, method = _layer(config, weight, scale_format)
    codes, scales = reference.quantize_weight(weight.cpu(), scale_format)
    assert torch.equal(layer.weight.cpu().view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(layer.weight_scale_inv.cpu(), scales)
    out = method.apply(layer, x).double().cpu()
    x_codes, x_scales = reference.quantize_activation(x.cpu(), scale_format)
    x_values = reference.dequantize_activation(x_codes, x_scales).double()
    w_values = reference.dequantize_weight(codes, scales).double()
    exact = x_values @ w_values.T
    largest = _block_maxima(x_values) @ _block_maxima(w_values).T
    bound = TENSOR_CORE * largest + BF16 * exact.abs()
    assert bool(torch.isfinite(out).all())
    assert float(((out - exact).abs() / bound).max()) < 1.0
    assert float((out - exact).norm() / exact.norm()) < BF16


def _block_maxima(values: Tensor) -> Tensor:
    """Largest magnitude of each row in every 128 columns."""
    return torch.stack([part.abs().amax(1) for part in values.split(reference.BLOCK, 1)], 1)


@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
def test_quantizer_on_the_gpu_is_bit_for_bit_the_cpus(scale_format):
    generator = torch.Generator().manual_seed(1)
    weight = (
        torch.randn(1030, 1500, generator=generator) * torch.rand(1030, 1, generator=generator) ** 8
    ).bfloat16()
    here, there = (
        reference.quantize_weight(weight, scale_format),
        reference.quantize_weight(weight.cuda(), scale_format),
    )
    assert torch.equal(here[0].view(torch.uint8), there[0].cpu().view(torch.uint8))
    assert torch.equal(here[1], there[1].cpu())


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_one_kernel_path_makes_the_same_of_a_token_whatever_is_beside(config, shape):
    generator = torch.Generator("cuda").manual_seed(0)
    weight = (torch.randn(shape, generator=generator, device="cuda") * 0.05).bfloat16()
    x = torch.randn(4096, shape[1], generator=generator, device="cuda").bfloat16()
    layer, method = _layer(config, weight, "fp32", batch_invariant=True)
    alone = method.apply(layer, x[:1])
    for tokens in (2, 17, 64, 65, 300, 4096):
        assert torch.equal(method.apply(layer, x[:tokens])[:1], alone), tokens


@pytest.mark.parametrize("gemm", ["triton", "cutlass"])
def test_nothing_compiles_after_the_warm_up(config, gemm):
    from vllm_fp8ext.compat.warmup import warm_up
    from vllm_fp8ext.kernels import compiled

    layer, method = _layer(
        config, torch.ones(4096, 4096, dtype=torch.bfloat16, device="cuda"), "fp32", gemm=gemm
    )
    layer.quant_method = method
    warm_up(layer, 2048)
    before = compiled.counts.copy()
    x = torch.ones(2048, 4096, dtype=torch.bfloat16, device="cuda")
    for tokens in (*range(1, 150), 160, 200, 256, 300, 512, 777, 1000, 1024, 1536, 2000, 2048):
        method.apply(layer, x[:tokens])
    assert compiled.counts == before
