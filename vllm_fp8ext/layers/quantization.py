# SPDX-License-Identifier: Apache-2.0
"""`--quantization blockfp8`: which layer is served how."""

import logging
from typing import Any

import torch
from vllm.config import ModelConfig, get_current_vllm_config
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.fused_moe import GateLinear, RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, ReplicatedLinear
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from vllm_fp8ext.config import METHOD, MIN_CAPABILITY, Settings
from vllm_fp8ext.errors import ConfigError
from vllm_fp8ext.kernels.numerics.reference import BLOCK
from vllm_fp8ext.layers.experts import BlockFp8ExpertsMethod, not_defined
from vllm_fp8ext.layers.kept_experts import ASKED, KeptExpertsMethod
from vllm_fp8ext.layers.kv_cache_method import KvCacheMethod
from vllm_fp8ext.layers.linear import BlockFp8LinearMethod, KeptEmbeddingMethod, KeptLinearMethod
from vllm_fp8ext.layers.lm_head import head_method
from vllm_fp8ext.layers.unquantized_layers import (
    DECAY,
    ENCODER,
    building_encoder,
    decides_decay,
    in_encoder,
    unfit,
)
from vllm_fp8ext.log import log_once

FEATURE: str = "core"
USES: dict[str, tuple[str, ...]] = {
    "know which layers are an encoder's": (
        "vllm.config.model:ModelConfig.is_multimodal_model",
        "vllm.config.model:ModelConfig.is_encoder_decoder",
    ),
    "choose the method of each layer": (
        "vllm.model_executor.layers.quantization.base_config:QuantizationConfig.get_quant_method("
        "layer, prefix)",
    ),
    "take block-FP8 checkpoints": (
        "vllm.model_executor.layers.quantization.base_config:QuantizationConfig.override_quantization_method("
        "hf_quant_cfg, user_quant)",
    ),
    "leave experts to vLLM": (
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod(moe)",
    ),
    "keep routers as they are": ("vllm.model_executor.layers.fused_moe:GateLinear",),
    "know a layer's shape on one rank": (
        "vllm.model_executor.layers.linear:LinearBase(input_size, output_size)",
    ),
    "match ignored layers": (
        "vllm.model_executor.layers.quantization.compressed_tensors.utils:should_ignore_layer("
        "layer_name, ignore, fused_mapping, use_fnmatch)",
    ),
}

logger = logging.getLogger("vllm.fp8ext")

MXFP4 = ("mxfp4", "gpt_oss_mxfp4")
"""Names of the quantization whose experts are dequantized as they are loaded."""
MATRICES = ("", ".gate_proj", ".up_proj", ".down_proj", ".w1", ".w2", ".w3")
"""Suffixes behind the number of an expert, in names by which one may be ignored."""


class BlockFp8Config(QuantizationConfig):
    """Blockwise FP8 for attention and MLP projections; embeddings, norms and what `kept` names stay as they are, and lm_head
    unless the settings say otherwise.

    vLLM makes one with no arguments for a BF16, FP16 or FP32 checkpoint, and through `from_config` for a checkpoint that
    is block FP8 already (DeepSeek's `weight` + `weight_scale_inv`).
    """

    def __init__(self, *, serialized: bool = False, kept: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.serialized = serialized
        """True if the checkpoint's projections are block FP8 already."""
        self.kept = kept
        """Modules that the checkpoint itself keeps unquantized."""
        self.shadow = False
        """Set on the copy that builds a shadow: layers are laid out, nothing is loaded or quantized through vLLM."""

    def get_name(self) -> str:
        return METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return MIN_CAPABILITY

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Take a block-FP8 checkpoint, or gpt-oss's MXFP4, when the user asked for blockfp8; never change anybody else's
        choice."""
        if user_quant != METHOD:
            return None
        known = _is_block_fp8(hf_quant_cfg) or (
            hf_quant_cfg.get("quant_method") in MXFP4 and getattr(hf_config, "model_type", None) == "gpt_oss"
        )
        return METHOD if known else None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "BlockFp8Config":
        if config.get("quant_method") in MXFP4:
            return cls()
        if not _is_block_fp8(config):
            raise ConfigError(
                "blockfp8 takes BF16, FP16, FP32 or 128x128 block-FP8 checkpoints, and gpt-oss's in MXFP4; this one's "
                "quantization_config says "
                f"quant_method={config.get('quant_method')!r}, weight_block_size={config.get('weight_block_size')!r}"
            )
        kept = config.get("modules_to_not_convert") or config.get("ignored_layers") or ()
        return cls(serialized=True, kept=tuple(kept))

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        self.kept = tuple(hf_to_vllm_mapper.apply_list(list(self.kept)))

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        config = get_current_vllm_config()
        settings = Settings.parse(config.additional_config)
        if isinstance(layer, RoutedExperts):
            return self._experts_method(settings, layer, prefix)
        if isinstance(layer, Attention | MLAAttention):
            return self._kv_cache_method(settings, layer.kv_cache_dtype)
        if isinstance(layer, VocabParallelEmbedding):
            return self._embedding_method(settings, layer, prefix)
        if isinstance(layer, LinearBase):
            apart = layer.params_dtype != config.model_config.dtype  # such as a classifier's head in fp32
            if apart or _routes(layer, prefix) or self._ignored(prefix, settings):
                return KeptLinearMethod()
            if not self.serialized and not self._named(prefix, settings.quantize):
                reason = _kept_because(layer, prefix, config.model_config)
                if reason:
                    return KeptLinearMethod(reason)
            return BlockFp8LinearMethod(settings, serialized=self.serialized, shadow=self.shadow)
        return None

    def _embedding_method(
        self, settings: Settings, layer: VocabParallelEmbedding, prefix: str
    ) -> QuantizeMethodBase:
        if settings.lm_head != "blockfp8" or not isinstance(layer, ParallelLMHead):
            return KeptEmbeddingMethod()
        if self._named(prefix, settings.ignore):
            raise ConfigError(f"lm_head blockfp8: expected ignore without {prefix}, or lm_head bf16")
        return head_method(settings, layer, get_current_vllm_config().model_config, shadow=self.shadow)

    def _ignored(self, prefix: str, settings: Settings) -> bool:
        return self._named(prefix, settings.ignore) or should_ignore_layer(
            prefix, ignore=self.kept, fused_mapping=self.packed_modules_mapping
        )

    def _named(self, prefix: str, patterns: tuple[str, ...]) -> bool:
        """Tell whether these name a layer: a fused one by its own name, or by those of all its parts."""
        if should_ignore_layer(prefix, ignore=patterns, use_fnmatch=True):
            return True
        try:
            mapping = self.packed_modules_mapping
            return should_ignore_layer(prefix, ignore=patterns, fused_mapping=mapping, use_fnmatch=True)
        except ValueError:
            parts = ", ".join(mapping[prefix.rpartition(".")[2]])
            raise ConfigError(
                f"{prefix} is one matrix: expected all of {parts} in ignore or quantize, or none, found some of them"
            ) from None

    def _experts_method(self, settings: Settings, layer: RoutedExperts, prefix: str) -> QuantizeMethodBase:
        experts = prefix.removesuffix(".routed_experts")
        if settings.staging == "none" and any(self._ignored(name, settings) for name in (prefix, experts)):
            return UnquantizedFusedMoEMethod(layer.moe_config)
        reason = self._experts_kept_because(settings, layer, prefix)
        if reason and not self.serialized:
            log_once(f"blockfp8 keeps experts in 16 bits: {reason}")
            return KeptExpertsMethod(layer.moe_config, prefix, reason, shadow=self.shadow)
        if reason == ASKED:
            raise ConfigError(
                f"a block-FP8 checkpoint has no experts in 16 bits: expected ignore without {experts}"
            )
        count = layer.moe_config.num_logical_experts if settings.ignore else 1
        matrices = [f"{experts}.{expert}{name}" for expert in range(count) for name in MATRICES]
        named = [name for name in matrices if self._ignored(name, settings)]
        if named:
            raise ConfigError(
                f"blockfp8 serves all experts of a layer alike: expected ignore without {named[0]}, or with {experts}"
            )
        return BlockFp8ExpertsMethod(
            settings, layer.moe_config, prefix, serialized=self.serialized, shadow=self.shadow
        )

    def _experts_kept_because(self, settings: Settings, layer: RoutedExperts, prefix: str) -> str | None:
        """Why the experts of a layer stay in 16 bits; None if they do not."""
        if any(self._ignored(name, settings) for name in (prefix, prefix.removesuffix(".routed_experts"))):
            return ASKED
        if layer.apply_router_weight_on_input:
            return "their input is weighted"
        odd = not_defined(layer.moe_config)
        return odd and f"FP8 does not define {odd} yet"

    def _kv_cache_method(self, settings: Settings, cache_dtype: str) -> QuantizeMethodBase | None:
        if not cache_dtype.startswith("fp8"):
            return None
        if settings.kv_scales is None:
            raise ConfigError(
                f"--kv-cache-dtype {cache_dtype} needs a choice of K and V scales: set --additional-config "
                '\'{"fp8ext": {"kv_scales": "calibrate"}}\' to compute them from tokens at the start and with each update, '
                '"static" to serve with those of the checkpoint; or leave the KV cache in 16 bits (--kv-cache-dtype auto)'
            )
        if settings.kv_scales.policy != "static" and settings.staging == "none":
            raise ConfigError(
                f"kv_scales {settings.kv_scales.policy} with staging none: scales could not be computed; expected staging "
                "shadow or inplace, or kv_scales static"
            )
        return KvCacheMethod(self, settings.kv_scales)

    @property
    def kv_cache_scheme(self) -> dict[str, str] | None:
        """Scheme with which vLLM looks for attention that takes a scale for each KV head."""
        config = get_current_vllm_config()
        chosen = Settings.parse(config.additional_config).kv_scales
        if (
            chosen is None
            or chosen.granularity != "head"
            or not config.cache_config.cache_dtype.startswith("fp8")
        ):
            return None
        return {"strategy": "attn_head"}


def _is_block_fp8(config: dict[str, Any]) -> bool:
    return config.get("quant_method") == "fp8" and config.get("weight_block_size") == [BLOCK, BLOCK]


def _kept_because(layer: LinearBase, prefix: str, model: ModelConfig) -> str | None:
    """Why a layer stays in 16 bits where nobody asks for it; None if it does not."""
    beside = model.is_multimodal_model or model.is_encoder_decoder
    if building_encoder.get() or (beside and in_encoder(prefix)):
        return ENCODER
    if decides_decay(prefix):
        return DECAY
    columns = getattr(layer, "input_size_per_partition", layer.input_size)
    return unfit(sum(layer.output_partition_sizes), columns, str(model.dtype).removeprefix("torch."))


def _routes(layer: LinearBase, prefix: str) -> bool:
    """Tell whether a layer sends tokens to experts, or weighs a shared one.

    Some models build routers as plain layers, or as modules with such a layer in them.
    """
    called_so = any(
        name == "gate" or name.endswith(("expert_gate", "experts_gate")) or "router" in name
        for name in prefix.split(".")[-2:]
    )
    return isinstance(layer, GateLinear) or (isinstance(layer, ReplicatedLinear) and called_so)
