# SPDX-License-Identifier: Apache-2.0
"""Fused experts of blockfp8.

A layer holds `w13_weight` (E4M3, `[experts of this rank, 2P, K]`: gate, then up) and `w2_weight` (`[experts, K, P]`), and
beside each its block scales. P is this rank's part of the intermediate size, padded with zeros to a multiple of 128, so that
no block spans gate and up: each expert's gate, up and down is a matrix with blocks of its own.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_ep_group
from vllm.model_executor.layers.fused_moe import FusedMoeWeightScaleSupported, RoutedExperts
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.quantization.online.moe_base import OnlineMoEMethodBase
from vllm.model_executor.utils import replace_parameter, set_weight_attrs

from vllm_fp8ext.config import Settings
from vllm_fp8ext.errors import ConfigError
from vllm_fp8ext.kernels.moe.expert_configs import ExpertRoute
from vllm_fp8ext.kernels.moe.experts import ACTIVATIONS, reference_experts
from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.numerics.reference import BLOCK, blocks
from vllm_fp8ext.kernels.quantize import quantize_weight
from vllm_fp8ext.layers import expert_gemm
from vllm_fp8ext.layers.block_matrix import BlockMatrix
from vllm_fp8ext.layers.expert_gemm import ExpertWeights
from vllm_fp8ext.layers.linear import require_scales

FEATURE: str = "core"
USES: dict[str, tuple[str, ...]] = {
    "quantize the experts of a layer as soon as they are loaded": (
        "vllm.model_executor.layers.quantization.online.moe_base:OnlineMoEMethodBase.create_weights("
        "layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype)",
    ),
    "know which experts this rank has": ("vllm.model_executor.layers.fused_moe:RoutedExperts.expert_map",),
    "tell experts from their padding": (
        "vllm.model_executor.layers.fused_moe.config:FusedMoEConfig("
        "hidden_dim_unpadded, intermediate_size_per_partition_unpadded, swiglu_limit)",
    ),
    "bring tokens to the ranks that have their experts": (
        "vllm.model_executor.layers.fused_moe.config:FusedMoEConfig.dp_size",
        "vllm.model_executor.layers.fused_moe.config:FusedMoEConfig.is_sequence_parallel",
        "vllm.distributed.parallel_state:GroupCoordinator.dispatch("
        "hidden_states, topk_weights, topk_ids, is_sequence_parallel)",
        "vllm.distributed.parallel_state:GroupCoordinator.combine(hidden_states, is_sequence_parallel)",
        "vllm.model_executor.layers.fused_moe.fused_moe_method_base:FusedMoEMethodBase.supports_internal_mk",
    ),
}

CODES = ("w13_weight", "w2_weight")
SCALES = ("w13_weight_scale_inv", "w2_weight_scale_inv")
DEQUANTIZED = ("w13_dequantized", "w2_dequantized")


IN_16_BITS = (
    '--additional-config \'{"fp8ext": {"staging": "none", "ignore": ["*.experts"]}}\', which leaves them to vLLM in 16 bits, '
    "without updates"
)
"""The settings that serve experts which are not served in FP8."""


def _not_served(which: str, name: str) -> ConfigError:
    return ConfigError(f"blockfp8 does not serve experts {which} in FP8 yet ({name}): expected {IN_16_BITS}")


def not_defined(moe: FusedMoEConfig) -> str | None:
    """Say what of experts has no definition in FP8 yet; None if all has."""
    activation = moe.activation.value
    odd = [
        *([f"the activation {activation}"] if activation not in ACTIVATIONS else []),
        *(["biases"] if moe.has_bias else []),
        *(["a limited SwiGLU"] if moe.swiglu_limit is not None else []),
    ]
    return ", ".join(odd) or None


class BlockFp8ExpertsMethod(OnlineMoEMethodBase):
    """The routed experts of one layer. `serialized`: the checkpoint holds codes and scales; `shadow`: lay them out for a
    shadow (`BlockFp8LinearMethod`).

    Raises:
        ConfigError: experts of a kind that is not served.
    """

    def __init__(
        self,
        settings: Settings,
        moe: FusedMoEConfig,
        prefix: str,
        *,
        serialized: bool = False,
        shadow: bool = False,
    ) -> None:
        super().__init__(moe)
        self.settings = settings
        self.scale_format = settings.scale_format
        self.serialized = serialized and not shadow
        self.route: ExpertRoute | None = None
        self.shadow = shadow
        self.uses_meta_device = not (self.serialized or shadow)
        odd = not_defined(moe)
        if odd:
            raise _not_served(f"with {odd}", prefix)

    @property
    def supports_eplb(self) -> bool:
        return False

    @property
    def supports_internal_mk(self) -> bool:
        """Tell vLLM whether `apply` itself brings tokens to the ranks that have their experts.

        vLLM would bring them before experts are chosen: by a mask of padding that is one rank's, which its kernels refuse for
        the tokens of all.
        """
        return not self.shadow and (self.moe.dp_size > 1 or self.moe.is_sequence_parallel)

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        """None: only vLLM's own kernels ask."""

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, *others: Any, **named: Any
    ) -> tuple[int, int]:
        hidden, width = super().maybe_roundup_sizes(
            hidden_size, intermediate_size_per_partition, *others, **named
        )
        return hidden, blocks(width) * BLOCK

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        if layer.apply_router_weight_on_input:
            raise _not_served("whose input is weighted", layer.layer_name)
        if self.shadow:
            width = intermediate_size_per_partition
            shapes = (num_experts, 2 * width, hidden_size), (num_experts, hidden_size, width)
            for name, shape in zip(CODES, shapes, strict=True):
                meta = torch.empty(shape, dtype=params_dtype, device="meta")
                parameter = torch.nn.Parameter(meta, requires_grad=False)
                set_weight_attrs(parameter, extra_weight_attrs)
                layer.register_parameter(name, parameter)
        elif self.serialized:
            self._create_serialized(layer, num_experts, hidden_size, extra_weight_attrs)
        else:
            super().create_weights(
                layer,
                num_experts,
                hidden_size,
                intermediate_size_per_partition,
                params_dtype,
                **extra_weight_attrs,
            )
        layer.weight_block_size = [BLOCK, BLOCK]
        self.route = expert_gemm.select(self.moe, hidden_size, self.settings.kernels)

    def _create_serialized(
        self, layer: RoutedExperts, experts: int, hidden: int, attributes: dict[str, Any]
    ) -> None:
        width = layer.moe_config.intermediate_size_per_partition_unpadded
        if width % BLOCK:
            raise ConfigError(
                f"block-FP8 checkpoint: each rank must have whole blocks of an expert, found {width} of its columns "
                f"({layer.layer_name}): use fewer ranks or --enable-expert-parallel, or start from BF16 weights"
            )
        kind = {"quant_method": FusedMoeWeightScaleSupported.BLOCK.value}
        for code, scale, rows, columns in zip(
            CODES, SCALES, (2 * width, hidden), (hidden, width), strict=True
        ):
            codes = torch.zeros(experts, rows, columns, dtype=reference.FP8_DTYPE)
            scales = torch.ones(experts, blocks(rows), blocks(columns), dtype=torch.float32)
            for name, tensor, more in ((code, codes, {}), (scale, scales, kind)):
                parameter = torch.nn.Parameter(tensor, requires_grad=False)
                set_weight_attrs(parameter, attributes | more)
                layer.register_parameter(name, parameter)

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        if self.shadow or getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        if self.serialized:
            for name in SCALES:
                require_scales(getattr(layer, name).data, self.scale_format)
        elif layer.w13_weight.is_cuda:
            self._quantize_together(layer)
        else:
            loaded = {matrix.name: matrix.values for matrix in self.matrices(layer)}
            self.allocate(layer, layer.w13_weight.device)
            for matrix in self.matrices(layer):
                assert matrix.scales is not None
                quantize_weight.quantize_weight(
                    loaded[matrix.name], matrix.values, matrix.scales, self.scale_format
                )
        self.derive(layer)
        layer._already_called_process_weights_after_loading = True

    def _quantize_together(self, layer: RoutedExperts) -> None:
        """All experts in one launch: blocks of one matrix, where each expert's rows are whole blocks."""
        self._zero_padding(layer)
        loaded = [getattr(layer, name).data for name in CODES]
        self.allocate(layer, loaded[0].device)
        for values, codes_name, scales_name in zip(loaded, CODES, SCALES, strict=True):
            codes, scales = getattr(layer, codes_name).data, getattr(layer, scales_name).data
            if values.shape[1] % BLOCK == 0:
                values, codes, scales = (tensor.flatten(0, 1)[None] for tensor in (values, codes, scales))
            for value, code, scale in zip(values, codes, scales, strict=True):
                quantize_weight.quantize_weight(value, code, scale, self.scale_format)

    def allocate(self, layer: RoutedExperts, device: torch.device) -> None:
        """Give a layer codes and scales on `device`; what is padding stays zero for good."""
        codes, scales = [], []
        for name in CODES:
            experts, rows, columns = getattr(layer, name).shape
            codes.append(torch.zeros(experts, rows, columns, dtype=reference.FP8_DTYPE, device=device))
            shape = experts, blocks(rows), blocks(columns)
            scales.append(torch.ones(shape, dtype=torch.float32, device=device))
        self.adopt(layer, codes, scales)

    def adopt(self, layer: RoutedExperts, codes: list[Tensor], scales: list[Tensor]) -> None:
        """Give a layer these codes and scales, of gate and up and of down."""
        for name, tensor in zip((*CODES, *SCALES), (*codes, *scales), strict=True):
            replace_parameter(layer, name, tensor)

    def adopt_from(self, layer: RoutedExperts, served: RoutedExperts) -> None:
        """Give a shadow's layer the codes and scales of another one."""
        self.adopt(layer, *([getattr(served, name).data for name in names] for names in (CODES, SCALES)))

    def matrices(self, layer: RoutedExperts) -> Iterator[BlockMatrix]:
        """Gate, up and down of every expert that this rank has."""
        hidden = layer.moe_config.hidden_dim_unpadded
        width = layer.moe_config.intermediate_size_per_partition_unpadded
        padded = layer.intermediate_size_per_partition
        gate_up, down = (getattr(layer, name).data for name in CODES)
        scales = [getattr(layer, name, None) for name in SCALES]
        tops = {"gate": 0, "up": padded}
        for expert in range(gate_up.shape[0]):
            for name, top in tops.items():
                first = top // BLOCK
                of = None if scales[0] is None else scales[0].data[expert, first : first + blocks(width)]
                values = gate_up[expert, top : top + width, :hidden]
                yield BlockMatrix(f"{CODES[0]}[{expert}].{name}", values, of, CODES[0], SCALES[0])
            of = None if scales[1] is None else scales[1].data[expert]
            yield BlockMatrix(f"{CODES[1]}[{expert}]", down[expert, :hidden, :width], of, CODES[1], SCALES[1])

    def weights(self, layer: RoutedExperts) -> ExpertWeights:
        """Return the parameters themselves, as the kernels of a GPU read them."""
        pairs = zip(CODES, SCALES, strict=True)
        return ExpertWeights(*(getattr(layer, name).data for pair in pairs for name in pair))

    def derive(self, layer: RoutedExperts) -> None:
        """Rebuild the dequantized copies by which the CPU backend multiplies, in place (`BlockFp8LinearMethod.derive`)."""
        if layer.w13_weight.is_cuda:
            return
        for name, codes, scales in zip(DEQUANTIZED, CODES, SCALES, strict=True):
            held = getattr(layer, codes).data
            if getattr(layer, name, None) is None:
                setattr(layer, name, torch.empty(held.shape, dtype=torch.float32, device=held.device))
            for place, expert, scale in zip(getattr(layer, name), held, getattr(layer, scales), strict=True):
                place.copy_(reference.dequantize_weight(expert, scale))

    def apply(
        self,
        layer: RoutedExperts,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        if not self.supports_internal_mk:
            return self._compute(layer, x, topk_weights, topk_ids)
        group, in_sequence = get_ep_group(), self.moe.is_sequence_parallel
        gathered = group.dispatch(x, topk_weights, topk_ids, in_sequence)
        return group.combine(self._compute(layer, *gathered), in_sequence)

    def _compute(self, layer: RoutedExperts, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        experts = topk_ids
        if layer.expert_map is not None:  # -1, of tokens that pad a batch, is no expert's and stays so
            experts = torch.where(topk_ids < 0, -1, layer.expert_map[topk_ids.clamp(min=0).long()])
        if self.route is not None:
            return expert_gemm.compute(
                *(self.route.choose(x.shape[0]), x, self.weights(layer), topk_weights, experts),
                *(layer.activation.value, self.scale_format),
            )
        here = getattr(layer, DEQUANTIZED[0], None) is not None  # a shadow has none
        weights = [getattr(layer, name) for name in (DEQUANTIZED if here else CODES)]
        scales = [None, None] if here else [getattr(layer, name) for name in SCALES]
        out = reference_experts(
            x,
            *(weights[0], scales[0], weights[1], scales[1]),
            *(topk_weights, experts, layer.activation.value, self.scale_format),
        )
        assert isinstance(out, Tensor)
        return out
