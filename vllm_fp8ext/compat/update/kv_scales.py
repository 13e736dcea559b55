# SPDX-License-Identifier: Apache-2.0
"""Reads and replaces the scale buffers of vLLM's attention layers."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.attention import Attention, MLAAttention

from vllm_fp8ext.errors import ConfigError
from vllm_fp8ext.kv_settings import KvScaleSettings
from vllm_fp8ext.kv_types import RankScales
from vllm_fp8ext.layers.kv_cache_method import FORMATS, share_of
from vllm_fp8ext.update.worker.kv_buffers import KvScaleBuffers

FEATURE: str = "core"
WHY: str = "Serve KV-cache scales that change with the weights: vLLM reads them from the checkpoint, once."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = ()
USES: dict[str, tuple[str, ...]] = {
    "rescale K and V that several layers read once": (
        "vllm.model_executor.layers.attention:Attention.kv_sharing_target_layer_name",
    ),
    "change every copy of a KV-cache scale": (
        "vllm.model_executor.layers.attention.attention:set_default_quant_scales(layer, register_buffer)",
    ),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM's FP8 KV cache takes new scales at run time"


def kv_scales_of(
    layers: Mapping[str, Any], settings: KvScaleSettings, total_heads: int, device: torch.device
) -> KvScaleBuffers:
    """Make the scales of a served model's attention layers, which `swap` alone changes."""
    if settings.granularity == "layer":
        return KvScaleBuffers(layers, {}, device=device)
    shares = {name: share_of(layer, total_heads) for name, layer in layers.items()}
    return KvScaleBuffers(layers, shares, device=device)


def attention_layers(model: nn.Module) -> list[Any]:
    """Attention layers that cache in FP8, in the order of the model."""
    kinds = Attention | MLAAttention
    return [m for m in model.modules() if isinstance(m, kinds) and m.kv_cache_dtype in FORMATS]


def owners_of_kv(layers: Mapping[str, Any], policy: str) -> dict[str, Any]:
    """Return the layers that write K and V, of which others may read some: these read them with scales of their own.

    Calibration gives both the same scales, since it observes the same K and V.

    Raises:
        ConfigError: another policy, which could give them different ones.
    """
    owners = {name: layer for name, layer in layers.items() if layer.kv_sharing_target_layer_name is None}
    if len(owners) < len(layers) and policy not in ("calibrate", "static"):
        raise ConfigError(
            f"kv_scales {policy}: {len(layers) - len(owners)} layers of this model read K and V of other layers, and their "
            "scales could become others; expected kv_scales calibrate or static"
        )
    return owners


def gather(mine: RankScales) -> list[RankScales]:
    """Gather what every rank of the tensor-parallel group has; all have to ask."""
    group = get_tp_group()
    if group.world_size == 1:
        return [mine]
    gathered: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(gathered, mine, group=group.cpu_group)
    return gathered
