# SPDX-License-Identifier: Apache-2.0
"""Experts that stay in 16 bits: those that FP8 experts do not define yet, and those that a setting names.

A layer holds `w13_weight` `[experts of this rank, N, K]` and `w2_weight` `[experts of this rank, K, P]`, with `w13_bias` and
`w2_bias` where the model has them, as vLLM's loaders fill them. Updates exchange them as any weight in 16 bits. On a GPU
vLLM's Triton kernel multiplies by them, which alone of its kernels reads weights as they are loaded; a CPU, and a shadow
while it is tried, run the definition in plain torch.
"""

import copy
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform

from vllm_fp8ext.errors import ConfigError
from vllm_fp8ext.kernels.moe.plain_experts import ALPHA, LIMIT, is_known, plain_experts

FEATURE: str = "core"
USES: dict[str, tuple[str, ...]] = {
    "serve experts in 16 bits": (
        "vllm.model_executor.layers.fused_moe.fused_moe_method_base:FusedMoEMethodBase(moe)",
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod(moe)",
        "vllm.model_executor.layers.fused_moe.config:FusedMoEConfig("
        "activation, has_bias, swiglu_limit, swiglu_alpha, swiglu_beta, moe_backend)",
    ),
}

ASKED = "named in ignore"
"""Why experts stay in 16 bits where a setting says so."""


class KeptExpertsMethod(FusedMoEMethodBase):
    """The routed experts of one layer in 16 bits. `reason`: why; `shadow`: of a shadow.

    Raises:
        ConfigError: experts whose activation is not defined, which no shadow could be tried with.
    """

    def __init__(self, moe: FusedMoEConfig, prefix: str, reason: str, *, shadow: bool = False) -> None:
        super().__init__(moe)
        self.prefix = prefix
        self.reason = reason
        self._kernels: UnquantizedFusedMoEMethod | None = None
        if not is_known(moe.activation.value):
            raise ConfigError(
                f"blockfp8 does not serve experts with the activation {moe.activation.value} ({prefix}): expected "
                '--additional-config \'{"fp8ext": {"staging": "none", "ignore": ["*.experts"]}}\', which leaves them to vLLM '
                "in 16 bits, without updates"
            )
        if current_platform.is_cuda() and not shadow:
            triton = copy.copy(moe)
            triton.moe_backend = "triton"
            self._kernels = UnquantizedFusedMoEMethod(triton)

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        rows = intermediate_size_per_partition * (2 if self.moe.is_act_and_mul else 1)
        shapes: dict[str, tuple[int, ...]] = {
            "w13_weight": (num_experts, rows, hidden_size),
            "w2_weight": (num_experts, hidden_size, intermediate_size_per_partition),
        }
        if self.moe.has_bias:
            shapes |= {"w13_bias": (num_experts, rows), "w2_bias": (num_experts, hidden_size)}
        for name, shape in shapes.items():  # what a rank has no part of stays zero
            parameter = torch.nn.Parameter(torch.zeros(shape, dtype=params_dtype), requires_grad=False)
            set_weight_attrs(parameter, extra_weight_attrs)
            layer.register_parameter(name, parameter)

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        if self._kernels is not None:
            self._kernels.process_weights_after_loading(layer)
            if self.moe.dp_size > 1 or self.moe.is_sequence_parallel:
                self.moe_kernel = (
                    self._kernels.moe_kernel
                )  # it brings tokens to other ranks: vLLM must not before

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> Any:
        return None if self._kernels is None else self._kernels.get_fused_moe_quant_config(layer)

    def apply(
        self,
        layer: RoutedExperts,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        if self._kernels is not None:
            out = self._kernels.apply(layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input)
            assert isinstance(out, Tensor)
            return out
        experts = topk_ids
        if layer.expert_map is not None:  # -1, of tokens that pad a batch, is no expert's and stays so
            experts = torch.where(topk_ids < 0, -1, layer.expert_map[topk_ids.clamp(min=0).long()])
        out = plain_experts(
            *(x, layer.w13_weight, getattr(layer, "w13_bias", None)),
            *(layer.w2_weight, getattr(layer, "w2_bias", None)),
            *(topk_weights, experts, self.moe.activation.value, self._limits()),
            layer.apply_router_weight_on_input,
        )
        assert isinstance(out, Tensor)
        return out

    def _limits(self) -> list[float]:
        """Limit, alpha and beta of a limited SwiGLU, as vLLM's kernels take them; empty for others."""
        activation, limit = self.moe.activation.value, self.moe.swiglu_limit
        if activation == "swigluoai":
            return [LIMIT, ALPHA, 1.0]
        if limit is None:
            return []
        if activation == "silu":
            return [limit, 1.0, 0.0]
        return [limit, self.moe.swiglu_alpha or 1.0, self.moe.swiglu_beta or 0.0]
