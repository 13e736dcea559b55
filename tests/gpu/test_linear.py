# SPDX-License-Identifier: Apache-2.0
"""The served linear layer on a Hopper GPU against the reference numerics."""

import functools
import itertools

import pytest
import torch
from torch import Tensor, nn

from vllm_fp8ext.checkpoints import EARLY
from vllm_fp8ext.kernels.gemm import linear
from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.testing import hard_cases, kernel_cases
from vllm_fp8ext.layers.gemm_kernels import LARGE_M

pytestmark = pytest.mark.gpu

SHAPES = [(6144, 4096), (4096, 12288), (192, 256), (200, 384), (256, 200), (192, 272)]


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
    from vllm_fp8ext.config import Settings
    from vllm_fp8ext.kernel_settings import KernelSettings
    from vllm_fp8ext.layers.linear import BlockFp8LinearMethod

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


@pytest.mark.parametrize("kind", hard_cases.GEMM_KINDS)
@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
@pytest.mark.parametrize(
    ("shape", "gemm"),
    [(shape, None) for shape in SHAPES]
    + list(itertools.product(SHAPES[:2], (kernel.name for kernel in LARGE_M))),
    ids=str,
)
@pytest.mark.parametrize("tokens", [1, 64, 300])
def test_linear_stays_within_the_bound(config, shape, tokens, scale_format, kind, gemm):
    x, weight = hard_cases.gemm_inputs(tokens, *shape, kind, "cuda")
    layer, method = _layer(config, weight, scale_format, gemm=gemm)
    codes, scales = _quantized_on_the_cpu(shape, kind, scale_format)
    assert kernel_cases.same(layer.weight[:, : shape[1]], codes)
    assert not layer.weight[:, shape[1] :].view(torch.uint8).any()
    assert kernel_cases.same(layer.weight_scale_inv, scales)
    out, quantized = method.apply(layer, x), reference.quantize_activation(x, scale_format)
    assert bool(torch.isfinite(out).all())
    codes, scales = codes.cuda(), scales.cuda()
    assert kernel_cases.gemm_error(out, *quantized, codes, scales) < 1
    values = reference.dequantize_activation(*quantized), reference.dequantize_weight(codes, scales)
    exact = values[0].double() @ values[1].double().T
    assert float((out.double() - exact).norm() / exact.norm()) < kernel_cases.BF16


@functools.cache
def _quantized_on_the_cpu(shape, kind, scale_format):
    """The weight of every number of tokens: it depends on its own shape alone."""
    weight = hard_cases.gemm_inputs(1, *shape, kind, "cuda")[1]
    return reference.quantize_weight(weight.cpu(), scale_format)


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


@pytest.mark.parametrize("gemm", [None, *(kernel.name for kernel in LARGE_M if kernel.name != "deep_gemm")])
def test_nothing_compiles_after_the_warm_up(config, gemm):
    from vllm_fp8ext.compat.warmup.compilations import counts
    from vllm_fp8ext.compat.warmup.warmup import warm_up

    layer, method = _layer(
        config, torch.ones(4096, 4096, dtype=torch.bfloat16, device="cuda"), "fp32", gemm=gemm
    )
    layer.quant_method = method
    warm_up(layer, 2048)
    before = counts()
    gate_up = torch.ones(2048, 2 * 4096, dtype=torch.bfloat16, device="cuda")
    x, norm = gate_up[:, :4096].contiguous(), gate_up[0, :4096]
    rest = layer.weight, layer.weight_scale_inv, None, "fp32", *method.route
    for tokens in (*range(1, 150), 160, 200, 256, 300, 512, 777, 1000, 1024, 1536, 2000, 2048):
        method.apply(layer, x[:tokens])
        linear.rmsnorm_linear(x[:tokens], None, norm, 1e-6, *rest)
        linear.rmsnorm_linear(x[:tokens], x[:tokens], norm, 1e-6, *rest)
        linear.gated_linear(gate_up[:tokens], "silu", *rest)
    assert counts() == before
