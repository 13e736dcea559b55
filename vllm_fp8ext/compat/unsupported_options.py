# SPDX-License-Identifier: Apache-2.0
"""Combinations with vLLM's own settings that blockfp8 refuses at start, each with its reason."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from vllm_fp8ext.compat.features import is_available, reason_missing, tell
from vllm_fp8ext.compat.speed import serving_speed
from vllm_fp8ext.compat.update import api_processes, data_parallel, ended_calls
from vllm_fp8ext.compat.update.drafts import unsupported_drafts
from vllm_fp8ext.compat.wrapping import wrap
from vllm_fp8ext.config import METHOD, Settings
from vllm_fp8ext.environment import ADMIN_KEY, key_of
from vllm_fp8ext.errors import WITHOUT_UPDATES, ConfigError

FEATURE: str = "core"
WHY: str = (
    "Refuse what can't be updated before anything is started: vLLM asks no quantization "
    "whether it takes a configuration."
)
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = ("vllm.engine.arg_utils:EngineArgs.create_engine_config",)
USES: dict[str, tuple[str, ...]] = {
    "refuse what can't be updated before anything is started": ("vllm.config.model:ModelConfig.use_mla",),
    "read the settings": ("vllm.config:VllmConfig.additional_config",),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM asks a quantization method whether it takes a configuration"


PERMUTED = frozenset({"Llama4ForCausalLM", "Llama4ForConditionalGeneration"})
"""Models whose loaders change the order of rows."""
EXPANDED = (
    "or the environment variable VLLM_MLA_DISABLE=1, which expands the attention of models that vLLM can run so "
    "(DeepSeek-V2 and V3, Kimi-K2, GLM-4.7-Flash), for much more KV cache"
)
"""The setting that serves latent attention as plain attention."""


def install() -> None:
    """Check every configuration that vLLM makes. Idempotent."""
    wrap(EngineArgs, "create_engine_config", _wrap_create_engine_config)


def _wrap_create_engine_config(original: Callable[..., Any]) -> Callable[..., Any]:
    def create(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = original(self, *args, **kwargs)
        if config.model_config.quantization == METHOD:
            settings = Settings.parse(config.additional_config)
            refuse_unsupported(config, settings)
            tell(config)
            data_parallel.tell(config)
            _configure_head(config, settings)
            _configure_transfer(config)
            serving_speed.install(settings.serving)
            api_processes.install(config, settings.spool_dir)
            ended_calls.install()
            if current_platform.is_cuda():
                _configure_graphs(config, self, settings)
        return config

    return create


def _configure_graphs(config: Any, arguments: Any, settings: Settings) -> None:
    """Have graphs compiled with our passes and captured in more sizes, where vLLM allows."""
    if is_available("fusion"):
        from vllm_fp8ext.compat.graphs import fusion

        fusion.configure(config, norm_rope=settings.kernels.norm_rope and is_available("norm_rope"))
    if is_available("piecewise_capture_sizes"):
        from vllm_fp8ext.compat.speed import piecewise_capture_sizes

        piecewise_capture_sizes.configure(config, arguments, settings.kernels.graph_tokens)


def _configure_head(config: Any, settings: Settings) -> None:
    """Have logits computed as the settings say."""
    from vllm_fp8ext.compat import fp32_head

    fp32_head.configure(config, settings)


def _configure_transfer(config: Any) -> None:
    """Give a blockfp8 model this plugin's engines of weight transfer."""
    if is_available("weight_transfer"):
        from vllm_fp8ext.compat.update import native_engines

        native_engines.configure(config.weight_transfer_config)


def _unsupported_transfer(config: Any) -> str | None:
    """Return why a configured engine of weight transfer can't serve a blockfp8 model."""
    transfer = getattr(config, "weight_transfer_config", None)
    if transfer is None:
        return None
    missing = reason_missing("weight_transfer")
    if missing is not None:
        return f"--weight-transfer-config: the feature weight_transfer is off, {missing}"
    from vllm_fp8ext.compat.update import native_engines

    return native_engines.unsupported(transfer)


def refuse_unsupported(config: Any, settings: Settings) -> None:
    """Raise `ConfigError` naming everything in a `VllmConfig` that can't be served, or updated live."""
    never = _never_supported(config, settings)
    live = _unsupported_live(config, settings) if settings.staging != "none" else []
    groups = (("blockfp8", never), ("blockfp8 with live updates", live))
    lines = [
        "\n  ".join([f"{what} can't be combined with:", *refused]) for what, refused in groups if refused
    ]
    if live:
        which = "the latter" if never else "they"
        lines.append(f"Without live updates ({WITHOUT_UPDATES}) {which} are not refused.")
    if lines:
        raise ConfigError("\n".join(lines))


def _never_supported(config: Any, settings: Settings) -> list[str]:
    """List what can't be served, with live updates or without."""
    cache_dtype = config.cache_config.cache_dtype
    never: list[str] = []
    quantizes_queries = config.model_config.use_mla and config.attention_config.use_prefill_query_quantization
    if quantizes_queries and cache_dtype.startswith("fp8"):
        never.append(
            "use_prefill_query_quantization with latent attention (MLA): what is cached would be read without its scales"
        )
    if os.environ.get("VLLM_SERVER_DEV_MODE", "0") not in ("", "0") and not _names_this_plugin():
        never.append(
            "VLLM_SERVER_DEV_MODE=1 without VLLM_PLUGINS=fp8ext: it opens weight routes that need no key, which "
            "this plugin's replace; expected fp8ext among VLLM_PLUGINS, or the variable unset"
        )
    transfer = _unsupported_transfer(config)
    if transfer is not None:
        never.append(f"{transfer}: it would write into served codes")
    try:
        key_of(os.environ.get(ADMIN_KEY))
    except ConfigError as error:
        never.append(str(error))
    if config.parallel_config.enable_eplb:
        never.append(
            "--enable-eplb: experts would move between ranks, away from where updates and digests look for them; leave it out"
        )
    if settings.kv_scales is not None and not cache_dtype.startswith("fp8"):
        never.append(
            f"kv_scales {settings.kv_scales.policy}: the KV cache has no scales; expected --kv-cache-dtype fp8, found "
            f"{cache_dtype}, or no kv_scales"
        )
    return never


def _unsupported_live(config: Any, settings: Settings) -> list[str]:
    """List what can't be served with live updates."""
    parallel, model = config.parallel_config, config.model_config
    reasons: list[str] = []
    if parallel.pipeline_parallel_size > 1:
        reasons += _unsupported_stages(config, settings)
    if parallel.data_parallel_size > 1:
        reasons += _unsupported_data_parallel(config, settings)
    if getattr(parallel, "nnodes", 1) > 1:
        reasons.append(
            f"--nnodes {parallel.nnodes}: bodies of updates lie in the memory of one machine, where ranks of another don't "
            "find them; run one server per machine, each takes its own updates"
        )
    if config.lora_config is not None and model.is_moe:
        reasons.append(
            "--enable-lora with a mixture of experts: updates of layers that adapters are added to were tried in dense "
            "models alone; merge adapters into the weights that are sent"
        )
    speculative = config.speculative_config
    drafts = speculative and unsupported_drafts(speculative, settings.draft_weights)
    if drafts:
        reasons.append(drafts)
    reasons += _unsupported_connectors(config)
    if model.runner_type == "pooling" and settings.canary is not None:
        reasons.append("a canary's prompts for a pooling model: it has no logits to score them by")
    if PERMUTED & set(model.architectures):
        reasons.append(
            "Llama 4: vLLM's loader sorts the rows of q_proj and k_proj anew, where an update could not follow"
        )
    if model.use_mla:
        reasons += _unsupported_latent(config)
    if getattr(parallel, "enable_ep_weight_filter", False):
        reasons.append("--enable-ep-weight-filter: no rank would know the names of the others' experts")
    return reasons


def _unsupported_connectors(config: Any) -> list[str]:
    """List what would bring K and V, or weights, from elsewhere."""
    reasons = []
    if config.kv_transfer_config is not None:
        reasons.append(
            "--kv-transfer-config: connectors look K and V up by their tokens; ExampleConnector gave back those of the "
            "weights before an update"
        )
    if getattr(config, "ec_transfer_config", None) is not None:
        reasons.append(
            "--ec-transfer-config: outputs of other weights' encoders could come through a connector"
        )
    offload = getattr(config, "offload_config", None)
    if offload is not None and _offloads(offload):
        reasons.append("CPU offload: offloaded weights have no address to exchange")
    return reasons


def _unsupported_data_parallel(config: Any, settings: Settings) -> list[str]:
    """Say what an update of several engine cores can't span."""
    problems, size = [], f"with --data-parallel-size {config.parallel_config.data_parallel_size}"
    beyond = data_parallel.beyond_one_server(config)
    if beyond is not None:
        problems.append(
            f"{beyond}: an update spans the engine cores that one server starts on one machine; run one server per replica, "
            "each takes its own updates"
        )
    if config.lora_config is not None:
        problems.append(f"--enable-lora {size}: adapters of several engine cores were not tried")
    if config.speculative_config is not None:
        problems.append(f"--speculative-config {size}: drafts in several engine cores were not tried")
    if settings.staging == "inplace":
        problems.append(f"staging inplace {size}: expected staging shadow")
    if config.model_config.enable_sleep_mode:
        problems.append(f"--enable-sleep-mode {size}: engine cores would fall asleep one by one")
    return problems


def _unsupported_stages(config: Any, settings: Settings) -> list[str]:
    """Say what was not tried in an update of several pipeline stages."""
    problems, parallel = [], config.parallel_config
    size = f"with --pipeline-parallel-size {parallel.pipeline_parallel_size}"
    executor = parallel.distributed_executor_backend
    if executor != "mp":
        problems.append(
            f"--distributed-executor-backend {executor} {size}: stages of processes of one machine were tried, expected mp"
        )
    if parallel.data_parallel_size > 1:
        problems.append(
            f"--data-parallel-size {parallel.data_parallel_size} {size}: stages of several engine cores were not tried"
        )
    if config.lora_config is not None:
        problems.append(f"--enable-lora {size}: adapters of several stages were not tried")
    if config.speculative_config is not None:
        problems.append(f"--speculative-config {size}: drafts of several stages were not tried")
    if settings.staging == "inplace":
        problems.append(f"staging inplace {size}: it was not tried, expected staging shadow")
    return problems


def _names_this_plugin() -> bool:
    """Tell whether vLLM loads this plugin's routes, for which it must be named."""
    return "fp8ext" in (os.environ.get("VLLM_PLUGINS") or "").split(",")


def _unsupported_latent(config: Any) -> list[str]:
    """Say why an update could not follow latent attention, and which setting serves the model."""
    problems = []
    if getattr(config.model_config.hf_text_config, "index_topk", None):
        problems.append(
            "sparse latent attention (index_topk): new weights could not be tried without its indexer, and no other "
            "attention has one"
        )
    if getattr(config.parallel_config, "decode_context_parallel_size", 1) > 1:
        problems.append(
            "--decode-context-parallel-size > 1 with latent attention (MLA): each rank copies the others' weights"
        )
    backend = getattr(config.attention_config.backend, "name", None)
    if current_platform.is_cpu() and torch.cpu._is_amx_tile_supported() and backend != "CPU_MLA":
        problems.append(
            "latent attention (MLA) by AMX, which packs its weights away: expected --attention-backend CPU_MLA; "
            f"{EXPANDED}"
        )
    return problems


def _offloads(offload: Any) -> bool:
    uva = getattr(offload, "uva", None)
    prefetch = getattr(offload, "prefetch", None)
    return bool(getattr(uva, "cpu_offload_gb", 0) or getattr(prefetch, "offload_group_size", 0))


def not_updatable(parts: Sequence[str], why: str) -> ConfigError:
    """Make the error of a model with such parts:"""
    return ConfigError(
        f"blockfp8 with live updates does not serve models with {', '.join(parts)} yet: an update {why} "
        f"({WITHOUT_UPDATES} serves them)"
    )
