# SPDX-License-Identifier: Apache-2.0
"""Builds what takes the updates of one worker.

That is the shadow beside its model, the scales of its KV cache, and the rank that has both.
"""

import logging
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig

from vllm_fp8ext.compat.update import head_copies, latent_weights
from vllm_fp8ext.compat.update.data_parallel import EngineCores
from vllm_fp8ext.compat.update.kv_recorder import KvRecorder
from vllm_fp8ext.compat.update.kv_rescale import CachedCodes
from vllm_fp8ext.compat.update.kv_scales import attention_layers, gather, kv_scales_of, owners_of_kv
from vllm_fp8ext.compat.update.lora_layers import without_adapters
from vllm_fp8ext.compat.update.model import checkpoint_specs, initialize_shadow, require_no_copies
from vllm_fp8ext.compat.update.shadow_attention import attend_plainly
from vllm_fp8ext.compat.update.tied_layers import tie_alike
from vllm_fp8ext.compat.update.unloaded_names import DUMMY, expected_specs
from vllm_fp8ext.compat.update.untried_layers import untried_layers
from vllm_fp8ext.compat.update.weight_names import names_of
from vllm_fp8ext.config import Settings
from vllm_fp8ext.errors import ConfigError, UpdateError
from vllm_fp8ext.layers.lm_head import is_tied
from vllm_fp8ext.update.contract.kv_request import check_prompts
from vllm_fp8ext.update.contract.kv_tokens import choose
from vllm_fp8ext.update.worker.kv_scales import RankKv
from vllm_fp8ext.update.worker.rank import Rank
from vllm_fp8ext.update.worker.shadow import Shadow

FEATURE: str = "core"
WHY: str = "Build the shadow beside the model, and account for it."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = ()
USES: dict[str, tuple[str, ...]] = {
    "account for the shadow before the KV cache is sized": (
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.model_memory_usage",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.model_memory_usage",
    ),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM calls plugins after a model was loaded and before the KV cache is sized"

logger = logging.getLogger("vllm.fp8ext")


def build_rank(worker: Any, config: VllmConfig, runner: Any, recorded: Any) -> Rank | None:
    """Return what takes a worker's updates; None where nobody knows what was loaded.

    `recorded`: the checkpoint as it was loaded (`compat.update.model.recorded_checkpoint`).

    Raises:
        ConfigError: the model can't be updated, or there is no room for its shadow.
    """
    if config.load_config.load_format == DUMMY:
        recorded.specs = expected_specs(config.model_config, runner.get_model())
    if not recorded.specs:
        logger.warning(
            "blockfp8: no live updates, because load format %r does not tell what it loaded",
            config.load_config.load_format,
        )
        return None
    settings = Settings.parse(config.additional_config)
    model = without_adapters(runner.get_model())
    device = next(model.parameters()).device
    cores, ranks = EngineCores.of(config), config.parallel_config.world_size
    number = cores.index * ranks + worker.rank
    with torch.inference_mode(False), torch.no_grad():
        shadow = _empty_shadow(model, config, device)
        untried = untried_layers(
            shadow,
            settings,
            shares_experts=config.parallel_config.data_parallel_size > 1,  # a core of a dense model has 1
            stages=config.parallel_config.pipeline_parallel_size,
        )
        require_no_copies(shadow)
        specs = checkpoint_specs(recorded.specs, config.model_config.dtype)
        tied = is_tied(config.model_config)
        if tied:
            tie_alike(model, shadow)
        names = names_of(shadow, config.model_config.hf_config, tied=tied)
        inplace = settings.staging == "inplace"
        beside = [one for one in (runner.get_draft_model(), runner.get_model()) if one not in (None, model)]
        weights = Shadow(model, shadow, specs, number, names, inplace=inplace, beside=beside)
        weights.require_equal(recorded.heads)
        kv = _kv_cache(model, weights, config, device)
    cost = weights.weight_swap.bytes
    blocks = _account(worker, runner, cost)
    if inplace:
        logger.warning(
            "blockfp8: staging inplace has no shadow: during an update nothing is generated, an update that fails half-way "
            "leaves the engine poisoned until a full one heals it, and there is no rollback"
        )
    _require_room(config.cache_config.kv_cache_memory_bytes, cost, device)
    return Rank(
        weights,
        number,
        ranks,
        blocks,
        attend_plainly,
        kv,
        untried=untried,
        pooling=config.model_config.runner_type == "pooling",
        cores=cores.count,
    )


def _empty_shadow(model: nn.Module, config: VllmConfig, device: torch.device) -> nn.Module:
    """Return a model of the same layers, whose weights no update has brought yet."""
    latent_weights.follow_updates(model)
    shadow = initialize_shadow(config, device)
    for tree in (model, shadow):
        head_copies.follow_updates(tree)
    return shadow


def _account(worker: Any, runner: Any, cost: int) -> int:
    """Count the shadow's bytes as the model's; returns how many blocks of the KV cache they are."""
    if hasattr(runner, "model_memory_usage"):
        runner.model_memory_usage += cost
    per_block = sum(spec.page_size_bytes for spec in worker.get_kv_cache_spec().values())
    blocks = -(-cost // per_block) if per_block else 0
    logger.info(
        "blockfp8: the shadow takes %.2f GiB, as much as %d KV-cache blocks", cost / (1 << 30), blocks
    )
    return blocks


def _require_room(kv_bytes: int | None, cost: int, device: torch.device) -> None:
    """Require room for a KV cache beside the model and its shadow."""
    if not kv_bytes or device.type != "cuda":
        return
    torch.cuda.empty_cache()  # what loading left with the allocator
    free, _ = torch.cuda.mem_get_info(device)
    if kv_bytes > free:
        raise ConfigError(
            f"--kv-cache-memory-bytes {kv_bytes}: only {free} bytes are free beside the model and its shadow "
            f"({cost} bytes): "
            'expected no more, or staging inplace or none (--additional-config \'{"fp8ext": {"staging": "inplace"}}\')'
        )


def _kv_cache(model: Any, shadow: Any, config: VllmConfig, device: torch.device) -> RankKv | None:
    """Return the FP8 KV cache's scales, computed before anything is cached; None without one."""
    settings = Settings.parse(config.additional_config).kv_scales
    if settings is None or not config.cache_config.cache_dtype.startswith("fp8"):
        return None
    of = config.model_config
    vocabulary, longest = of.get_vocab_size(), of.max_model_len
    layers = {layer.layer_name: layer for layer in attention_layers(model)}
    scales = kv_scales_of(layers, settings, of.get_total_num_kv_heads(), device)
    recorder = KvRecorder(layers, settings.record_every) if settings.policy == "history" else None
    kv = RankKv(scales, settings, CachedCodes(owners_of_kv(layers, settings.policy)), recorder)
    if settings.policy != "static":
        try:
            check_prompts(settings.prompts or (), settings, vocabulary, longest)
        except UpdateError as error:
            raise ConfigError(str(error)) from None
        shadow.copy_unsent([])
        shadow.derive()
        tokens = choose(None, settings, [], vocabulary, longest)
        kv.begin(shadow.model, device, attend_plainly, tokens, gather)
    return kv
