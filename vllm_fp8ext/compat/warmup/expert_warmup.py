# SPDX-License-Identifier: Apache-2.0
"""Compiles every kernel that fused experts can need, before the server is ready.

Numbers of tokens are those of the registered kernels (`ExpertKernel.tuned_tokens`).
"""

import itertools

import torch
import vllm.envs as envs
from torch import nn
from vllm.model_executor.layers.fused_moe import RoutedExperts

from vllm_fp8ext.compat.warmup.deep_gemm_sizes import Sizes
from vllm_fp8ext.compat.warmup.quantizer_warmup import warm_up_quantizers
from vllm_fp8ext.kernels.moe import expert_rows
from vllm_fp8ext.kernels.moe.expert_configs import ExpertRoute
from vllm_fp8ext.kernels.numerics.quantized import empty
from vllm_fp8ext.layers.expert_gemm import alignment, compute, grouped
from vllm_fp8ext.layers.expert_kernels import DEEP_GEMM_EXPERTS, EXPERT_KERNELS
from vllm_fp8ext.layers.experts import BlockFp8ExpertsMethod

FEATURE: str = "warmup"
WHY: str = "Compile the kernels of experts before the server is ready: vLLM warms up its own methods alone."
GAIN: str = "no request waits for a compiler"
REPLACES: tuple[str, ...] = ()
USES: dict[str, tuple[str, ...]] = {}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM warms up kernels of a plugin's methods"
GPU_ONLY: bool = True

Layers = list[tuple[RoutedExperts, BlockFp8ExpertsMethod, ExpertRoute]]
"""One layer of each shape, activation and route."""


def expert_layers(model: nn.Module) -> Layers:
    """Find the layers to warm up."""
    layers: dict[object, tuple[RoutedExperts, BlockFp8ExpertsMethod, ExpertRoute]] = {}
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, BlockFp8ExpertsMethod) and method.route is not None:
            key = module.w13_weight.shape, module.activation, method.route
            layers.setdefault(key, (module, method, method.route))
    return list(layers.values())


def expert_sizes(layers: Layers, max_tokens: int) -> Sizes:
    """All sizes at which DeepGEMM can multiply, by shape of weights `(N, K, E)`."""
    sizes: dict[tuple[int, ...], set[int]] = {}
    for layer, _, route in layers:
        for weight in (layer.w13_weight, layer.w2_weight):
            rows = _deep_gemm_rows(route, weight.shape[0], max_tokens)
            if rows:
                sizes.setdefault((*weight.shape[1:], weight.shape[0]), set()).update(rows)
    return {shape: sorted(rows) for shape, rows in sizes.items()}


def _deep_gemm_rows(route: ExpertRoute, experts: int, max_tokens: int) -> list[int]:
    """Every number of rows that DeepGEMM is given for up to `max_tokens` tokens: by it and the shape it picks a kernel."""
    if envs.VLLM_DEEP_GEMM_WARMUP == "skip":
        return []
    counts = [
        count for count in range(1, max_tokens + 1) if route.choose(count).kernel == DEEP_GEMM_EXPERTS.name
    ]
    return grouped_rows(counts, route.chosen, experts, alignment()) if counts else []


def grouped_rows(counts: list[int], chosen: int, experts: int, align: int) -> list[int]:
    """Rows of the grouped GEMM for these numbers of tokens, as `deep_gemm` asks for them."""
    return sorted({expert_rows.capacity(count * chosen, experts, align) for count in counts})


def token_counts(route: ExpertRoute, tuned: list[int], most: int) -> list[int]:
    """At which another kernel is taken, or another variant of one, up to `most` tokens. `tuned`: for which vLLM has sizes
    of its Triton kernel; others take the nearest."""
    steps = {slots // route.chosen for slots in (expert_rows.SMALL, expert_rows.CHUNK)}
    steps |= {(low + high) // 2 for low, high in itertools.pairwise(tuned)}
    steps |= {*tuned, *route.boundaries(most), 0}
    return sorted({most, *(count for step in steps for count in (step, step + 1) if 0 < count <= most)})


def run_experts(layers: Layers, max_tokens: int, *, deep_gemm: bool) -> None:
    """Run each kernel once for every layer: those with DeepGEMM between them, or all others."""
    for layer, method, route in layers:
        if deep_gemm:
            _multiply(layer, route, max_tokens)
        else:
            for matrix in itertools.islice(method.matrices(layer), 3):  # of one expert, without what pads it
                assert matrix.scales is not None
                warm_up_quantizers(matrix.values, matrix.scales, method.scale_format)
        _run(layer, method, route, max_tokens, deep_gemm)


def _multiply(layer: RoutedExperts, route: ExpertRoute, max_tokens: int) -> None:
    """DeepGEMM's kernels at every size, the largest first, whose memory then does for all; no row belongs to an expert."""
    for codes, scales in (
        (layer.w13_weight, layer.w13_weight_scale_inv),
        (layer.w2_weight, layer.w2_weight_scale_inv),
    ):
        ends = torch.zeros(codes.shape[0], dtype=torch.int32, device=codes.device)
        for rows in reversed(_deep_gemm_rows(route, codes.shape[0], max_tokens)):
            grouped(empty(rows, codes.shape[2], codes.device), codes, scales, ends)


def _run(
    layer: RoutedExperts, method: BlockFp8ExpertsMethod, route: ExpertRoute, max_tokens: int, deep_gemm: bool
) -> None:
    hidden, device = layer.w13_weight.shape[2], layer.w13_weight.device
    experts, _, width = layer.w2_weight.shape
    tuned: list[int] = []
    for name in sorted({route.choose(count).kernel for count in range(1, max_tokens + 1)}):
        tuned += EXPERT_KERNELS[name].tuned_tokens(experts, width)
    x = torch.zeros(max_tokens, hidden, dtype=method.moe.in_dtype, device=device)
    for count in token_counts(route, sorted({*tuned}), max_tokens):
        choice = route.choose(count)
        if (choice.kernel == DEEP_GEMM_EXPERTS.name) != deep_gemm:
            continue
        chosen = torch.arange(count * route.chosen, dtype=torch.int32, device=device) % experts
        weights = torch.ones(count, route.chosen, device=device)
        compute(
            *(choice, x[:count], method.weights(layer), weights, chosen.view(count, route.chosen)),
            *(layer.activation.value, method.scale_format),
        )
