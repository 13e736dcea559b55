# SPDX-License-Identifier: Apache-2.0
"""Linear and embedding methods of blockfp8.

A quantized layer holds `weight` (E4M3, `[N, K]` of this rank) and `weight_scale_inv` (fp32, one per 128x128 block of the
fused, rank-local matrix): the canonical layout, which is also what the kernels used here read. On a GPU zeros may lie behind
the K columns, up to whole blocks.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase
from vllm.model_executor.layers.quantization.utils.fp8_utils import (
    create_fp8_scale_parameter,
    create_fp8_weight_parameter,
    validate_fp8_block_shape,
)
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.parameter import BlockQuantScaleParameter, ModelWeightParameter
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform

from vllm_fp8ext.config import Settings
from vllm_fp8ext.errors import ConfigError
from vllm_fp8ext.kernels.gemm.linear import reference_linear
from vllm_fp8ext.kernels.gemm.selection import GemmRoute
from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.numerics.reference import BLOCK, ScaleFormat
from vllm_fp8ext.kernels.quantize import quantize_weight
from vllm_fp8ext.layers import gemm
from vllm_fp8ext.layers.block_matrix import BlockMatrix

FEATURE: str = "core"
USES: dict[str, tuple[str, ...]] = {
    "quantize each layer as soon as its last shard is loaded": (
        "vllm.model_executor.layers.quantization.online.fp8:OnlineLinearBase",
    ),
    "load block-FP8 checkpoints": (
        "vllm.model_executor.layers.quantization.utils.fp8_utils:create_fp8_weight_parameter",
        "vllm.model_executor.layers.quantization.utils.fp8_utils:create_fp8_scale_parameter",
        "vllm.model_executor.layers.quantization.utils.fp8_utils:validate_fp8_block_shape",
    ),
    "keep embeddings in the checkpoint's precision": (
        "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod",
    ),
}

CODES = "weight"
SCALES = "weight_scale_inv"
_KEPT = "fp8ext_kept"


class BlockFp8LinearMethod(OnlineLinearBase):
    """One quantized projection, fused or not.

    `serialized`: the checkpoint holds codes and scales. `shadow`: lay the layer out for a shadow; its weight stays on the
    meta device until `allocate` gives it codes and scales.
    """

    columns: int | None = None
    """Columns of the weight, where codes have more: zeros, for kernels that take whole blocks."""

    def __init__(self, settings: Settings, *, serialized: bool = False, shadow: bool = False) -> None:
        super().__init__()
        self.settings = settings
        self.scale_format = settings.scale_format
        self.serialized = serialized and not shadow
        self.shadow = shadow
        self.uses_meta_device = not (self.serialized or shadow)
        self.route: GemmRoute | None = None

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        rows, columns = sum(output_partition_sizes), input_size_per_partition
        loader = extra_weight_attrs.get("weight_loader")
        if self.serialized or self.shadow:
            layer.logical_widths = output_partition_sizes
            layer.input_size_per_partition = columns
            layer.output_size_per_partition = rows
            layer.orig_dtype = params_dtype
        if self.serialized:
            validate_fp8_block_shape(
                layer, input_size, output_size, columns, output_partition_sizes, [BLOCK, BLOCK]
            )
            layer.register_parameter(CODES, create_fp8_weight_parameter(rows, columns, loader))
            layer.register_parameter(
                SCALES,
                create_fp8_scale_parameter(
                    BlockQuantScaleParameter, output_partition_sizes, columns, [BLOCK, BLOCK], loader
                ),
            )
        elif self.shadow:
            meta = torch.empty(rows, columns, dtype=params_dtype, device="meta")
            layer.register_parameter(
                CODES, ModelWeightParameter(data=meta, input_dim=1, output_dim=0, weight_loader=loader)
            )
        else:
            super().create_weights(
                layer,
                columns,
                output_partition_sizes,
                input_size,
                output_size,
                params_dtype,
                **extra_weight_attrs,
            )
        layer.weight_block_size = [BLOCK, BLOCK]
        self.route = gemm.select((rows, columns), self.out_dtype, self.settings.kernels)
        self.columns = None if gemm.stored_columns(columns) == columns else columns

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if self.shadow or getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        if self.serialized:
            require_scales(getattr(layer, SCALES).data, self.scale_format)
            if self.columns is not None:
                codes, _ = self._room(layer.weight)
                self._own(codes).copy_(layer.weight)
                replace_parameter(layer, CODES, codes)
        else:
            codes, scales = self._room(layer.weight)
            quantize_weight.quantize_weight(layer.weight, self._own(codes), scales, self.scale_format)
            replace_parameter(layer, CODES, codes)
            replace_parameter(layer, SCALES, scales)
        self.derive(layer)
        layer._already_called_process_weights_after_loading = True

    def _room(self, weight_NK: Tensor, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        """Make codes and scales for a weight: uninitialized, but for columns of zeros behind its own."""
        codes, scales = quantize_weight.empty_like(weight_NK, device)
        if self.columns is not None:
            wide = gemm.stored_columns(self.columns)
            codes = torch.zeros(codes.shape[0], wide, dtype=codes.dtype, device=codes.device)
        return codes, scales

    def _own(self, codes: Tensor) -> Tensor:
        """Return the columns of the weight itself, `[N, K]`, of what a layer holds."""
        return codes if self.columns is None else codes[:, : self.columns]

    def allocate(self, layer: torch.nn.Module, device: torch.device) -> None:
        """Give a shadow's layer uninitialized codes and scales on `device`."""
        self.adopt(layer, *self._room(layer.weight, device))

    def adopt(self, layer: torch.nn.Module, codes: Tensor, scales: Tensor) -> None:
        """Give a shadow's layer these codes and scales."""
        replace_parameter(layer, CODES, codes)
        replace_parameter(layer, SCALES, scales)

    def adopt_from(self, layer: torch.nn.Module, served: torch.nn.Module) -> None:
        """Give a shadow's layer the codes and scales of another one."""
        self.adopt(layer, served.weight.data, getattr(served, SCALES).data)

    def matrices(self, layer: torch.nn.Module) -> Iterator[BlockMatrix]:
        """The one matrix of the layer."""
        scales = getattr(layer, SCALES, None)
        values = self._own(layer.weight.data)
        yield BlockMatrix(CODES, values, None if scales is None else scales.data, CODES, SCALES)

    def derive(self, layer: torch.nn.Module) -> None:
        """Rebuild what is computed from the codes; in place, so that addresses stay. Needed after every exchange.

        The CPU backend multiplies by a dequantized copy: converting FP8 at every step would dominate its time.
        """
        if layer.weight.device.type != "cpu":
            return
        values = reference.dequantize_weight(self._own(layer.weight), getattr(layer, SCALES))
        if getattr(layer, "dequantized", None) is None:
            layer.dequantized = values
        else:
            layer.dequantized.copy_(values)

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        if self.route is not None:
            decode_tokens, name = self.route
            out = torch.ops.fp8ext.linear(
                flat, layer.weight, layer.weight_scale_inv, bias, self.scale_format, decode_tokens, name
            )
        else:
            weight = getattr(layer, "dequantized", None)  # a shadow has none
            if weight is None:
                weight = reference.dequantize_weight(self._own(layer.weight), getattr(layer, SCALES))
            out = reference_linear(flat, weight, self.scale_format)
            if bias is not None:
                out = out + bias
        return out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[-1])


def require_scales(scales: Tensor, scale_format: ScaleFormat) -> None:
    """Raises `ConfigError` unless these are scales that a block-FP8 checkpoint may have."""
    if not bool((torch.isfinite(scales) & (scales > 0)).all()):
        raise ConfigError(
            "block-FP8 checkpoint: expected positive finite weight_scale_inv, found other values"
        )
    if scale_format == "pow2" and not reference.is_pow2(scales):
        raise ConfigError(
            "scale_format pow2 with a block-FP8 checkpoint whose scales are not powers of two would round its weights "
            "twice: serve it with scale_format fp32, or start from its BF16 weights"
        )


class KeptLinearMethod(UnquantizedLinearMethod):
    """A projection kept in the checkpoint's precision.

    Its weight stays readable and exchangeable on the CPU too. vLLM's own method packs the weight into an opaque handle there
    and drops the original. `reason`: why, where the settings did not say so.
    """

    def __init__(self, reason: str | None = None) -> None:
        super().__init__()
        self.reason = reason

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        _keep(super().process_weights_after_loading, layer)


class KeptEmbeddingMethod(UnquantizedEmbeddingMethod):
    """Embedding and lm_head, likewise."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        _keep(super().process_weights_after_loading, layer)


def _keep(process: Any, layer: torch.nn.Module) -> None:
    if current_platform.is_cpu():
        layer.cpu_linear = torch.nn.functional.linear
        setattr(layer.weight, _KEPT, True)
    else:
        process(layer)


def is_kept(weight: Tensor) -> bool:
    """Tell whether a weight lies on a CPU as it was loaded; vLLM's own methods pack it."""
    return getattr(weight, _KEPT, False)
