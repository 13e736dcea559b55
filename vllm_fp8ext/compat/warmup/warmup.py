# SPDX-License-Identifier: Apache-2.0
"""Compiles every kernel that the model can need, before the server is ready.

Numbers of tokens are those of the registered kernels (`GemmKernel.warmup_shapes`).
"""

import itertools
import logging
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import torch
import vllm.envs as envs
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import GemmaRMSNorm

from vllm_fp8ext.compat.features import is_available
from vllm_fp8ext.compat.warmup.deep_gemm_compile import compile_ahead
from vllm_fp8ext.compat.warmup.deep_gemm_sizes import Sizes
from vllm_fp8ext.compat.warmup.expert_warmup import expert_layers, expert_sizes, run_experts
from vllm_fp8ext.compat.warmup.quantizer_warmup import warm_up_quantizers, warm_up_together
from vllm_fp8ext.kernels.gemm import decode_gemm, decode_gemm_configs
from vllm_fp8ext.kernels.gemm.registry import DECODE_GEMM, GEMM_KERNELS
from vllm_fp8ext.kernels.numerics.reference import ScaleFormat
from vllm_fp8ext.kernels.quantize.gated_quantize import ACTIVATIONS, gated_quantize
from vllm_fp8ext.kernels.quantize.quantize_activation import large_m, quantize_activation
from vllm_fp8ext.kernels.quantize.rmsnorm_quantize import rmsnorm_quantize
from vllm_fp8ext.kernels.runtime import compile_counts
from vllm_fp8ext.layers.gemm_kernels.deep_gemm import DEEP_GEMM
from vllm_fp8ext.layers.linear import SCALES, BlockFp8LinearMethod
from vllm_fp8ext.layers.lm_head import products

FEATURE: str = "warmup"
WHY: str = (
    "Compile kernels before the server is ready: vLLM warms DeepGEMM up for its own linear methods alone."
)
GAIN: str = "no request waits for a compiler"
REPLACES: tuple[str, ...] = ()
USES: dict[str, tuple[str, ...]] = {
    "know norms that multiply by one more than their weight": (
        "vllm.model_executor.layers.layernorm:GemmaRMSNorm",
    ),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM warms up kernels of a plugin's methods"
GPU_ONLY: bool = True

logger = logging.getLogger("vllm.fp8ext")

Layers: TypeAlias = dict[tuple[int, int], tuple[Any, BlockFp8LinearMethod]]
"""One layer of each shape, or what else holds codes and scales."""


@torch.inference_mode()
def warm_up(model: nn.Module, max_tokens: int, sampler: VllmConfig | None = None) -> None:
    """Run each kernel once for every shape of weight in `model`, for up to `max_tokens`.

    `model`: one served model, or several in one module. Machine code is compiled on all cores first, DeepGEMM's in processes
    beside this one while it makes all others. `sampler`: of an engine whose masks of logits are compiled too.
    """
    start = time.perf_counter()
    layers: Layers = {}
    for holder, method in products(model):
        if method.route is not None:
            layers.setdefault((holder.weight.shape[0], holder.weight.shape[1]), (holder, method))
    experts, norms = expert_layers(model), norms_that_add_one(model)
    gathered = max_tokens * max((method.moe.dp_size for _, method, _ in experts), default=1)  # of all ranks
    sizes = {**_deep_gemm_sizes(layers, max_tokens), **expert_sizes(experts, gathered)}
    with ThreadPoolExecutor(1) as beside:
        device = next(model.parameters()).device
        ahead = beside.submit(compile_ahead, sizes, device)
        _compile(layers)
        for layer, method in layers.values():
            _run(layer, method, max_tokens, norms)
        run_experts(experts, gathered, deep_gemm=False)
        formats = {method.scale_format for _, method in layers.values()}
        formats |= {method.scale_format for _, method, _ in experts}
        for scale_format in formats or {"fp32"}:
            warm_up_together(device, scale_format)
        if sampler is not None and is_available("mask_warmup"):
            from vllm_fp8ext.compat.warmup.mask_warmup import warm_up_masks

            warm_up_masks(sampler)
        ahead.result()
    for layer, method in layers.values():
        _multiply(layer, method, max_tokens)
    run_experts(experts, gathered, deep_gemm=True)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # a trainer on the same GPU may need what was left with the allocator
    if layers or experts:
        logger.info(
            "blockfp8: kernels for %d shapes are ready after %.1f s (compiled: %s)",
            *(len(layers) + len(experts), time.perf_counter() - start),
            ", ".join(f"{count} by {name}" for name, count in compile_counts.counts.items()) or "none",
        )


def _compile(layers: Layers) -> None:
    programs = set()
    for (n, k), (_, method) in layers.items():
        for tokens, quantized in _decode_kernels(method):
            config = decode_gemm_configs.choose(n, k, tokens, quantized=quantized)
            form = "fp32" if quantized else method.scale_format
            programs.add((config.rows, config.splits, tokens, form, quantized, config.stream))
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda program: decode_gemm.machine_code(*program), programs))


def _decode_kernels(method: BlockFp8LinearMethod) -> list[tuple[int, bool]]:
    """Widths of the decode GEMM that the layer can take, and whether activations come quantized."""
    assert method.route is not None
    decode_tokens, gemm = method.route
    every = gemm == DECODE_GEMM
    quantized = decode_gemm_configs.TOKENS if every else decode_gemm_configs.widths(decode_tokens)
    inside = decode_gemm_configs.widths(min(decode_tokens, decode_gemm.PROLOGUE_TOKENS))
    return [(tokens, True) for tokens in quantized] + [(tokens, False) for tokens in inside]


def _tokens(layer: Any, method: BlockFp8LinearMethod, max_tokens: int) -> list[int]:
    """Numbers of tokens at which the kernel for large M is another one."""
    assert method.route is not None
    beyond = range(method.route.decode_tokens + 1, max_tokens + 1)
    return sorted({max_tokens, *GEMM_KERNELS[method.route.gemm].warmup_shapes(layer.weight, beyond)})


def _deep_gemm_sizes(layers: Layers, max_tokens: int) -> Sizes:
    if envs.VLLM_DEEP_GEMM_WARMUP == "skip":
        return {}
    return {
        shape: _tokens(layer, method, max_tokens)
        for shape, (layer, method) in layers.items()
        if method.route is not None and method.route.gemm == DEEP_GEMM.name
    }


def norms_that_add_one(model: nn.Module) -> set[bool]:
    """Tell which kinds of norms a model has: whether they multiply by one more than their weight."""
    norms = [module for module in model.modules() if "Norm" in type(module).__name__]
    return {isinstance(norm, GemmaRMSNorm) for norm in norms} or {False}


def _run(
    layer: Any, method: BlockFp8LinearMethod, max_tokens: int, adds_one: Collection[bool] = (False,)
) -> None:
    assert method.route is not None
    weight, scales, form = layer.weight, getattr(layer, SCALES), method.scale_format
    width = weight.shape[1]
    k = method.columns or width
    warm_up_quantizers(weight[:, :k], scales, form)
    dtype = method.out_dtype
    x = torch.zeros(decode_gemm_configs.TOKENS[-1], k, dtype=dtype, device=weight.device)
    norm = torch.ones(k, dtype=dtype, device=weight.device)
    few = {False, method.route.decode_tokens > 0}
    for small_m, residual, one in itertools.product(few, (None, x[:1]), adds_one):
        rmsnorm_quantize(x[:1], residual, norm, 1e-6, form, small_m=small_m, adds_one=one, width=width)
    for count in {1, min(large_m(k), max_tokens)}:
        _quantize(torch.zeros(count, 2 * k, dtype=dtype, device=weight.device), form, width)
    for tokens, before in _decode_kernels(method):
        if before:
            decode_gemm.decode_gemm(
                quantize_activation(x[:tokens], form, width=width), weight, scales, None, form
            )
        else:
            decode_gemm.decode_gemm(x[:tokens], weight[:, :k], scales, None, form)


def _quantize(gate_up_M2K: torch.Tensor, form: ScaleFormat, width: int | None = None) -> None:
    """Quantize activations by every kernel that does, but a norm."""
    x_MK = gate_up_M2K[:, : gate_up_M2K.shape[1] // 2].contiguous()
    for activation in ACTIVATIONS:
        gated_quantize(gate_up_M2K, activation, form, width=width)
    quantize_activation(x_MK, form, width=width)


def _multiply(layer: Any, method: BlockFp8LinearMethod, max_tokens: int) -> None:
    assert method.route is not None
    weight, scales, form = layer.weight, getattr(layer, SCALES), method.scale_format
    x = torch.zeros(max_tokens, weight.shape[1], dtype=method.out_dtype, device=weight.device)
    for count in _tokens(layer, method, max_tokens):
        x_quantized = quantize_activation(x[:count], form)
        GEMM_KERNELS[method.route.gemm].run(x_quantized, weight, scales, method.out_dtype)
