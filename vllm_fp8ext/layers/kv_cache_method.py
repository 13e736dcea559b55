# SPDX-License-Identifier: Apache-2.0
"""The KV-cache method of blockfp8: scales that the checkpoint brings, and what is served of them at first.

Derives from `BaseKVCacheMethod`, since vLLM asks for that class. Can go once vLLM's FP8 KV cache takes new scales at run
time.
"""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

from vllm_fp8ext.errors import ConfigError
from vllm_fp8ext.kv_settings import KvScaleSettings
from vllm_fp8ext.kv_types import NAMES, HeadShare, write_host_copies
from vllm_fp8ext.log import log_once

FEATURE: str = "core"
USES: dict[str, tuple[str, ...]] = {
    "serve KV-cache scales": (
        "vllm.model_executor.layers.quantization.kv_cache:BaseKVCacheMethod(quant_config)",
    ),
    "know which KV heads' scales are a rank's": ("vllm.config.model:ModelConfig.get_total_num_kv_heads",),
}

LATENT_BACKENDS = ("FLASHMLA", "TRITON_MLA")
"""Backends of latent attention (MLA) that do so: one row of each token is key and value, with the scale of K."""
BACKENDS = ("FLASH_ATTN", "TRITON_ATTN", "CPU_ATTN", *LATENT_BACKENDS)
"""Attention backends with a known cache that read scales anew in every step.

They do so inside CUDA graphs too.
"""
FORMATS = ("fp8", "fp8_e4m3")
PER_HEAD = ("FLASH_ATTN",)
"""Attention that takes a scale for each KV head."""


class KvCacheMethod(BaseKVCacheMethod):
    """Placeholders for the checkpoint's scales, and what is served of them at first."""

    def __init__(self, quant_config: Any, settings: KvScaleSettings) -> None:
        super().__init__(quant_config)
        self.settings = settings

    def create_weights(self, layer: nn.Module) -> None:
        """`q_scale`, `k_scale`, `v_scale`: -1 where the checkpoint has none; one, or `[KV heads]`. In fp32: vLLM's own
        have the model's dtype, which would round a checkpoint's scales."""
        super().create_weights(layer)
        _require_backend(layer, self.settings)
        for name in NAMES:
            if self.settings.granularity == "head":
                setattr(layer, f"{name}_scale", _head_scales(layer))
            else:
                parameter = getattr(layer, f"{name}_scale")
                parameter.data = parameter.data.float()

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Serve the checkpoint's scales; where it has none, 1.0, or under `static` the default that was chosen.

        Raises:
            ConfigError: `static`, no scales in the checkpoint and no default.
        """
        if not hasattr(layer, "k_scale"):
            return
        loaded = {name: getattr(layer, f"{name}_scale").detach().float().cpu().reshape(-1) for name in NAMES}
        known = {name: values for name, values in loaded.items() if bool((values > 0).all())}
        if "k" in known:  # older checkpoints have one `kv_scale`, which vLLM loads as K's alone
            known.setdefault("v", known["k"])
        if self.settings.policy == "static" and not {"k", "v"} <= known.keys():
            if self.settings.default is None:
                raise ConfigError(
                    f"kv_scales static: the checkpoint has no K and V scales for {layer.layer_name}; expected them, or "
                    '{"policy": "static", "default": 1.0} to serve with that number, or another policy, such as calibrate'
                )
            for name in ("k", "v"):
                known.setdefault(name, torch.full_like(loaded[name], self.settings.default))
        if "q" not in known and bool((loaded["k"] > 0).all()):
            log_once("blockfp8: the checkpoint has scales of K and V but none of Q (q_scale): Q has K's")
        known.setdefault("q", known.get("k", torch.ones(1)))
        heads, per_head = len(loaded["k"]), self.settings.granularity == "head"
        for name in NAMES:
            values = known.get(name, torch.ones(1)).expand(heads)
            served = values.to(getattr(layer, f"_{name}_scale").device)
            setattr(layer, f"_{name}_scale", served.clone() if per_head else served[0].clone())
            write_host_copies(layer, name, float(values.max()))
        for name in (*NAMES, "prob"):
            delattr(layer, f"{name}_scale")


def _head_scales(layer: Any) -> nn.Parameter:
    """Make a parameter of one scale for each KV head of this rank. A checkpoint has those of all ranks, or one for all."""
    parameter = nn.Parameter(
        torch.full((layer.num_kv_heads,), -1.0, dtype=torch.float32), requires_grad=False
    )

    def weight_loader(target: Tensor, loaded: Tensor) -> None:
        values = loaded.reshape(-1)
        if values.numel() > 1:
            share = share_of(layer, values.numel())
            values = values[share.first : share.first + share.count]
        target.data.copy_(values.expand(target.shape))

    parameter.weight_loader = weight_loader
    return parameter


def share_of(layer: Any, total: int) -> HeadShare:
    """Return which of a layer's `total` KV heads are on this rank."""
    rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    share = HeadShare.of(rank, size, total)
    if share.count != layer.num_kv_heads:
        raise ConfigError(
            f"{layer.layer_name}: expected {share.count} of {total} KV heads on each of {size} ranks, "
            f"found {layer.num_kv_heads}"
        )
    return share


def _require_backend(layer: Any, settings: KvScaleSettings) -> None:
    if layer.kv_cache_dtype not in FORMATS:
        raise ConfigError(f"kv_scales: expected --kv-cache-dtype fp8 (E4M3), found {layer.kv_cache_dtype}")
    backend = layer.attn_backend.get_name()
    if settings.granularity == "head" and backend not in PER_HEAD:
        raise ConfigError(
            f"kv_scales granularity head: expected attention by {', '.join(PER_HEAD)}, found {backend}"
        )
    if settings.policy == "history" and backend in LATENT_BACKENDS:
        raise ConfigError(
            "kv_scales history: traffic of latent attention (MLA) is not recorded; expected calibrate, provided or static"
        )
    if settings.policy != "static" and backend not in BACKENDS:
        raise ConfigError(
            f"kv_scales {settings.policy}: {backend} keeps the scales with which its CUDA graphs were captured, so they "
            f"could not change with the weights; expected attention by one of {', '.join(BACKENDS)} (--attention-backend), "
            "or kv_scales static"
        )
