# SPDX-License-Identifier: Apache-2.0
"""Compiles every kernel that fused experts can need, before the server says that it is ready.

Replaces nothing; calls `_generate_optimal_warmup_m_values` as `warmup.py` does, and reads the token counts for which vLLM has
tuned its Triton kernel.
"""

import itertools

import torch
import vllm.envs as envs
from torch import nn
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.fused_moe import get_moe_configs
from vllm.model_executor.warmup.deep_gemm_warmup import _generate_optimal_warmup_m_values

from vllm_fp8ext.compat.deep_gemm_compile import compile_ahead
from vllm_fp8ext.compat.expert_gemm import alignment, run
from vllm_fp8ext.compat.quantizer_warmup import warm_up_quantizers
from vllm_fp8ext.experts import BlockFp8ExpertsMethod
from vllm_fp8ext.kernels import expert_rows
from vllm_fp8ext.kernels.expert_cuts import ExpertRoute
from vllm_fp8ext.kernels.reference import BLOCK

_UNTUNED = [4, 8, 16, 64]
"""Most tokens of each of the sizes that vLLM takes where it has tuned none."""


def warm_up_experts(model: nn.Module, max_tokens: int) -> int:
    """Run each kernel once for every shape of experts in `model`, after DeepGEMM's were compiled on all cores. How many
    shapes there are."""
    layers: dict[object, tuple[RoutedExperts, BlockFp8ExpertsMethod, ExpertRoute]] = {}
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, BlockFp8ExpertsMethod) and method.route is not None:
            key = module.w13_weight.shape, module.activation, method.route
            layers.setdefault(key, (module, method, method.route))
    sizes: dict[tuple[int, ...], set[int]] = {}
    for layer, _, route in layers.values():
        experts = layer.w13_weight.shape[0]
        rows = {
            expert_rows.capacity(count * route.chosen, experts, alignment())
            for count in _many(layer, route, max_tokens)
        }
        for weight in (layer.w13_weight, layer.w2_weight) if rows else ():
            sizes.setdefault((*weight.shape[1:], experts), set()).update(rows)
    if sizes:
        device = next(iter(layers.values()))[0].w13_weight.device
        compile_ahead({shape: sorted(counts) for shape, counts in sizes.items()}, torch.bfloat16, device)
    for layer, method, route in layers.values():
        _run(layer, method, route, max_tokens)
    return len(layers)


def _many(layer: RoutedExperts, route: ExpertRoute, max_tokens: int) -> set[int]:
    """Numbers of tokens at which DeepGEMM may take another kernel, and which it gets."""
    if route.many != "deep_gemm" or envs.VLLM_DEEP_GEMM_WARMUP == "skip":
        return set()
    found = {max_tokens}
    for weight in (layer.w13_weight, layer.w2_weight):
        found |= set(_generate_optimal_warmup_m_values(max_tokens, weight.shape[1], weight.device))
    return {count for count in found if route.choose(count).kernel == "deep_gemm"}


def token_counts(route: ExpertRoute, tuned: list[int], most: int) -> list[int]:
    """At which another kernel is taken, or another variant of one, up to `most` tokens. `tuned`: for which vLLM has sizes
    of its Triton kernel; others take the nearest."""
    steps = {slots // route.chosen for slots in (expert_rows.SMALL, expert_rows.CHUNK)}
    steps |= {(low + high) // 2 for low, high in itertools.pairwise(tuned)}
    steps |= {*tuned, *route.boundaries(most), 0}
    return sorted({most, *(count for step in steps for count in (step, step + 1) if 0 < count <= most)})


def _run(layer: RoutedExperts, method: BlockFp8ExpertsMethod, route: ExpertRoute, max_tokens: int) -> None:
    hidden, device = layer.w13_weight.shape[2], layer.w13_weight.device
    experts, _, width = layer.w2_weight.shape
    for weight in (layer.w13_weight, layer.w2_weight):
        warm_up_quantizers(weight[0], method.scale_format)
    found = get_moe_configs(experts, width, "fp8_w8a8", BLOCK, BLOCK) or {}
    counts = {*token_counts(route, sorted(found) or _UNTUNED, max_tokens), *_many(layer, route, max_tokens)}
    x = torch.zeros(max_tokens, hidden, dtype=method.moe.in_dtype, device=device)
    for count in sorted(counts):
        chosen = torch.arange(count * route.chosen, dtype=torch.int32, device=device) % experts
        weights = torch.ones(count, route.chosen, device=device)
        run(
            *(route, x[:count], method.weights(layer), weights, chosen.view(count, route.chosen)),
            *(layer.activation.value, method.scale_format),
        )
