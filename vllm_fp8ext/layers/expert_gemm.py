# SPDX-License-Identifier: Apache-2.0
"""Selects and runs the kernels of fused experts: vLLM's grouped GEMMs for large M, our own for small M.

Replaces: `select_fp8_moe_backend` and vLLM's modular kernels, which may take a kernel that lays weights out anew, choose once
for all numbers of tokens, and write into one workspace of the whole process, where a shadow would meet the served model.
vLLM's own CUTLASS experts take no block scales. Can go once this project has kernels of its own for every number of tokens.
"""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.platforms import current_platform
from vllm.utils.deep_gemm import get_mk_alignment_for_contiguous_layout, m_grouped_fp8_gemm_nt_contiguous

from vllm_fp8ext.config import SECTION
from vllm_fp8ext.errors import ConfigError
from vllm_fp8ext.kernel_settings import KernelSettings
from vllm_fp8ext.kernels.moe.expert_configs import ExpertChoice, ExpertRoute, expert_route
from vllm_fp8ext.kernels.numerics.quantized import Quantized
from vllm_fp8ext.kernels.numerics.reference import BLOCK, ScaleFormat
from vllm_fp8ext.layers.expert_kernels import EXPERT_KERNELS
from vllm_fp8ext.layers.gemm import varies
from vllm_fp8ext.log import log_once

FEATURE: str = "core"
USES: dict[str, tuple[str, ...]] = {
    "cut vLLM's Triton kernel of experts as it was tuned": (
        "vllm.model_executor.layers.fused_moe.fused_moe:try_get_optimal_moe_config("
        "w1_shape, w2_shape, top_k, dtype, M, block_shape)",
    ),
    "multiply by the experts of tokens that are neither few nor many": (
        "vllm.model_executor.layers.fused_moe.fused_moe:invoke_fused_moe_triton_kernel("
        "mul_routed_weight, top_k, config, compute_type, use_fp8_w8a8, block_shape)",
    ),
}

_SPECIALIZED = 16


class ExpertWeights(NamedTuple):
    """Codes and scales of one layer as they are served (`layers/experts.py`), contiguous; E experts of this rank."""

    gate_up: Tensor
    """E4M3 `[E, 2P, K]`."""
    gate_up_scales: Tensor
    """fp32 `[E, 2P/128, Kb]`."""
    down: Tensor
    """E4M3 `[E, K, P]`."""
    down_scales: Tensor
    """fp32 `[E, Kb, P/128]`."""


def select(moe: FusedMoEConfig, hidden: int, settings: KernelSettings) -> ExpertRoute | None:
    """Choose what multiplies by the experts of a layer; None where the reference runs (CPUs).

    Raises:
        ConfigError: a kernel that the settings name does not take them here, or `batch_invariant` can't be kept.
    """
    if not current_platform.is_cuda():
        return None
    chosen, dtype = settings.experts, str(moe.in_dtype).removeprefix("torch.")
    usable = [kernel.name for kernel in EXPERT_KERNELS.values() if kernel.supports(hidden, dtype)]
    try:
        route = expert_route(
            moe.num_experts,
            moe.experts_per_token,
            usable,
            batch_invariant=settings.batch_invariant,
            fused_tokens=chosen.fused_tokens,
            triton_tokens=chosen.triton_tokens,
            gemm=chosen.gemm,
        )
    except ValueError as error:
        raise ConfigError(f'--additional-config "{SECTION}": kernels.experts: {error}') from None
    if settings.batch_invariant and not EXPERT_KERNELS[route.gemm].batch_invariant():
        raise varies("experts")
    _log(route)
    return route


def _log(route: ExpertRoute) -> None:
    small_m = [f"fused up to {route.fused_tokens} tokens"] if route.fused_tokens else []
    if route.triton_tokens > route.fused_tokens:
        small_m.append(f"triton up to {route.triton_tokens} tokens")
    kernels = ", ".join([*small_m, f"{route.gemm} beyond"])
    log_once(f"blockfp8 multiplies by {route.experts} experts with {kernels}")


def compute(
    choice: ExpertChoice,
    x_MK: Tensor,
    weights: ExpertWeights,
    weights_MT: Tensor,
    experts_MT: Tensor,
    activation: str,
    scale_format: ScaleFormat,
) -> Tensor:
    """`reference_experts` by this kernel. Memory comes from torch's allocator, so that a CUDA graph of one model and another
    model's steps share none."""
    if not x_MK.shape[0]:
        return torch.zeros_like(x_MK)
    x_MK = x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()
    routing = weights_MT.float().contiguous(), experts_MT.int().contiguous()
    kernel = EXPERT_KERNELS[choice.kernel]
    return kernel.run(x_MK, weights, *routing, activation, scale_format, choice.config)


def triton(
    x_MK: Tensor,
    weights: ExpertWeights,
    weights_MT: Tensor,
    experts_MT: Tensor,
    activation: str,
    scale_format: ScaleFormat,
) -> Tensor:
    """vLLM's Triton kernel with vLLM's tuned sizes, between our own quantizers and our own sum."""
    from vllm.model_executor.layers.fused_moe.fused_moe import try_get_optimal_moe_config

    from vllm_fp8ext.kernels.moe.expert_rows import expert_rows
    from vllm_fp8ext.kernels.moe.expert_sum import expert_sum
    from vllm_fp8ext.kernels.quantize.gated_quantize import Activation, gated_quantize
    from vllm_fp8ext.kernels.quantize.quantize_activation import quantize_activation

    (m, t), (e, height, k) = experts_MT.shape, weights.gate_up.shape
    config = try_get_optimal_moe_config(
        weights.gate_up.size(), weights.down.size(), t, "fp8_w8a8", m, block_shape=[BLOCK, BLOCK]
    )
    rows = expert_rows(experts_MT, e, config["BLOCK_SIZE_M"])
    # Triton compiles anew where sizes or distances become multiples of 16, or cease to be
    room = -(-m // _SPECIALIZED) * _SPECIALIZED
    gate_up = torch.empty(room, t, height, dtype=x_MK.dtype, device=x_MK.device)
    parts = torch.empty(room, t, k, dtype=x_MK.dtype, device=x_MK.device)
    ordered = rows.slots, rows.owners, rows.used
    # each of a program's tokens lies somewhere else: of scales by token the cache then has those of the next columns, too
    quantized = quantize_activation(x_MK, scale_format, room, by_token=True)
    _triton(quantized, weights.gate_up, weights.gate_up_scales, gate_up, *ordered, t, config)
    function = cast("Activation", activation)
    active = gated_quantize(gate_up.view(room * t, height), function, scale_format, by_token=True)
    _triton(active, weights.down, weights.down_scales, parts, *ordered, 1, config)
    return expert_sum(parts.view(room * t, k), None, weights_MT, experts_MT, x_MK.dtype)


def _triton(
    x: Quantized,
    codes: Tensor,
    scales: Tensor,
    out: Tensor,
    slots: Tensor,
    owners: Tensor,
    used: Tensor,
    each: int,
    config: dict[str, Any],
) -> None:
    from vllm.model_executor.layers.fused_moe.fused_moe import invoke_fused_moe_triton_kernel
    from vllm.triton_utils import tl

    invoke_fused_moe_triton_kernel(
        x.codes,
        codes,
        out,
        x.scales,
        scales,
        None,
        slots,
        owners,
        used,
        mul_routed_weight=False,
        top_k=each,
        config=config,
        compute_type=tl.bfloat16 if out.dtype == torch.bfloat16 else tl.float16,
        use_fp8_w8a8=True,
        use_int8_w8a8=False,
        use_int8_w8a16=False,
        use_int4_w4a16=False,
        per_channel_quant=False,
        block_shape=[BLOCK, BLOCK],
    )


def deep_gemm(
    x_MK: Tensor,
    weights: ExpertWeights,
    weights_MT: Tensor,
    experts_MT: Tensor,
    activation: str,
    scale_format: ScaleFormat,
) -> Tensor:
    """Run DeepGEMM's grouped kernel between our own quantizers and our own sum.

    The quantizers bring each expert's tokens together.
    """
    from vllm_fp8ext.kernels.moe.expert_rows import expert_rows
    from vllm_fp8ext.kernels.moe.expert_sum import expert_sum
    from vllm_fp8ext.kernels.quantize.gated_quantize import Activation, gated_quantize
    from vllm_fp8ext.kernels.quantize.quantize_activation import quantize_to_rows

    rows = expert_rows(experts_MT, weights.gate_up.shape[0], alignment())
    places_MT = rows.places.view(experts_MT.shape)
    quantized = quantize_to_rows(x_MK, scale_format, rows.slots.shape[0], places_MT)
    gate_up = grouped(quantized, weights.gate_up, weights.gate_up_scales, rows.ends)
    active = gated_quantize(gate_up, cast("Activation", activation), scale_format, rows.places)
    parts = grouped(active, weights.down, weights.down_scales, rows.ends)
    return expert_sum(parts, places_MT, weights_MT, experts_MT, x_MK.dtype)


def alignment() -> int:
    """Return the multiple that each expert's first row must be for `grouped`."""
    return int(get_mk_alignment_for_contiguous_layout()[0])


def grouped(x: Quantized, codes: Tensor, scales: Tensor, ends_E: Tensor) -> Tensor:
    """BF16 `[R, N]`: rows of each expert times its weight `[N, K]`. `ends_E`: where they end (`Rows.ends`)."""
    out = torch.empty(x.codes.shape[0], codes.shape[1], dtype=torch.bfloat16, device=codes.device)
    m_grouped_fp8_gemm_nt_contiguous(x, (codes, scales), out, ends_E, use_psum_layout=True)
    return out
