# SPDX-License-Identifier: Apache-2.0
"""Registry of the kernels that multiply by fused experts: what settings, selection, warm-up and benchmarks read of each.

Imports neither torch nor vLLM: the functions of an entry import what they need when they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from vllm_fp8ext.kernels.gemm.registry import always, nothing
from vllm_fp8ext.kernels.moe.expert_configs import FUSED_KERNEL, ExpertTileConfig
from vllm_fp8ext.kernels.numerics.layout import BLOCK

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_fp8ext.kernels.numerics.reference import ScaleFormat
    from vllm_fp8ext.layers.expert_gemm import ExpertWeights

FEATURE: str = "core"


@dataclass(frozen=True, kw_only=True)
class ExpertKernel:
    """A kernel that multiplies tokens by their experts, and adds up the results."""

    name: str
    """Name in settings (`kernels.experts.gemm`), logs and benchmarks."""

    run: Callable[[Tensor, ExpertWeights, Tensor, Tensor, str, ScaleFormat, ExpertTileConfig | None], Tensor]
    """Computes `reference_experts`: `(x_MK, weights, weights_MT, experts_MT, activation, scale_format, config)`."""

    supports: Callable[[int, str], bool] = always
    """Tells whether it runs on this machine: `(hidden, dtype)`, the dtype of activations as torch names it."""

    tuned_tokens: Callable[[int, int], Sequence[int]] = nothing
    """Numbers of tokens that it has sizes for, of which others take the nearest: `(experts, width)` of this rank."""

    batch_invariant: Callable[[], bool] = always
    """Tells whether the result for a token is the same whatever it is computed beside."""


def _without_config(name: Literal["deep_gemm", "triton"]) -> Callable[..., Tensor]:
    """Return a `run` that calls a function of `expert_gemm`, which chooses its tiles by itself."""

    def run(*operands: Any) -> Tensor:
        from vllm_fp8ext.layers import expert_gemm

        *others, _config = operands
        return cast("Tensor", getattr(expert_gemm, name)(*others))

    return run


def _supports_deep_gemm(hidden: int, dtype: str) -> bool:
    from vllm_fp8ext.layers.deep_gemm import deep_gemm_runs

    return dtype == "bfloat16" and hidden % BLOCK == 0 and deep_gemm_runs()


def _triton_tuned_tokens(experts: int, width: int) -> Sequence[int]:
    from vllm_fp8ext.layers.expert_tuning import triton_tokens

    return triton_tokens(experts, width)


def _triton_batch_invariant() -> bool:
    import vllm.envs as envs

    return bool(envs.VLLM_BATCH_INVARIANT)


def _run_fused(
    x_MK: Tensor,
    weights: ExpertWeights,
    weights_MT: Tensor,
    experts_MT: Tensor,
    activation: str,
    scale_format: ScaleFormat,
    config: ExpertTileConfig | None,
) -> Tensor:
    from vllm_fp8ext.kernels.moe.expert_mlp import expert_mlp

    assert config is not None
    return expert_mlp(x_MK, *weights, weights_MT, experts_MT, activation, scale_format, config)


def _never() -> bool:
    return False


DEEP_GEMM_EXPERTS = ExpertKernel(
    name="deep_gemm", run=_without_config("deep_gemm"), supports=_supports_deep_gemm
)
"""DeepGEMM's grouped GEMM between kernels of this project."""
TRITON_EXPERTS = ExpertKernel(
    name="triton",
    run=_without_config("triton"),
    tuned_tokens=_triton_tuned_tokens,
    batch_invariant=_triton_batch_invariant,
)
"""vLLM's Triton kernel between kernels of this project."""
FUSED_EXPERTS = ExpertKernel(name=FUSED_KERNEL, run=_run_fused, batch_invariant=_never)
"""This project's kernels for small M (`expert_mlp`)."""

EXPERT_KERNELS: dict[str, ExpertKernel] = {
    kernel.name: kernel for kernel in (DEEP_GEMM_EXPERTS, TRITON_EXPERTS, FUSED_EXPERTS)
}
"""Kernels by name, the fastest for large M first."""
