# SPDX-License-Identifier: Apache-2.0
"""Gives each worker its shadow, and a method through which the engine reaches it.

`WorkerWrapperBase.load_model` otherwise falls through to the worker.
"""

import contextlib
import logging
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
from vllm.platforms import current_platform
from vllm.v1.worker.worker_base import WorkerWrapperBase

from vllm_fp8ext.compat.features import adopt, is_available
from vllm_fp8ext.compat.update import cpu_conv, cpu_kv_rounding, foreign_loaders
from vllm_fp8ext.compat.update.data_parallel import EngineCores
from vllm_fp8ext.compat.update.owner_process import follow_engine
from vllm_fp8ext.compat.warmup import cpu_tiles
from vllm_fp8ext.compat.warmup.compilations import counts
from vllm_fp8ext.config import METHOD, Settings
from vllm_fp8ext.errors import ConfigError, UpdateError, errors_as_results
from vllm_fp8ext.layers.unquantized_layers import report
from vllm_fp8ext.update.contract.operations import RankMethod
from vllm_fp8ext.update.contract.rank_results import RankProgress, RankReply, RankResult

FEATURE: str = "core"
WHY: str = "Build the shadow beside the model: vLLM calls no plugin between loading and sizing the KV cache."
GAIN: str = "correctness, not speed"
REPLACES: tuple[str, ...] = (
    "vllm.v1.worker.gpu_worker:Worker.load_model",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.load_model",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.load_model",
)
USES: dict[str, tuple[str, ...]] = {
    "account for the shadow before the KV cache is sized": (
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.model_memory_usage",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.model_memory_usage",
    ),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM calls plugins after a model was loaded and before the KV cache is sized"

logger = logging.getLogger("vllm.fp8ext")


def install() -> None:
    """Add our methods to the class that wraps every worker. Idempotent."""
    WorkerWrapperBase.load_model = load_model
    WorkerWrapperBase.fp8ext = call
    WorkerWrapperBase.fp8ext_compiled = lambda self: counts()


def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Load the model; under blockfp8, in the same memory pool, on a GPU give its layers our attention, and with live updates
    build its shadow and account for it. On a GPU then compile what it runs on. On a CPU, its tile registers are asked for."""
    worker, config = self.worker, self.vllm_config
    if current_platform.is_cpu():
        cpu_tiles.allow()
    if config.model_config.quantization != METHOD:
        return worker.load_model(*args, **kwargs)
    adopt(config)
    follow_engine()
    if current_platform.is_cpu():
        cpu_conv.install()
        cpu_kv_rounding.install()

    from vllm_fp8ext.compat.update import encoder_layers, latent_cache, latent_weights
    from vllm_fp8ext.compat.update.lora_layers import without_adapters
    from vllm_fp8ext.compat.update.model import kept_layers, recorded_checkpoint
    from vllm_fp8ext.compat.update.mxfp4_checkpoints import dequantized_mxfp4
    from vllm_fp8ext.compat.update.repeated_tensors import no_tensor_twice

    encoder_layers.install()
    latent_weights.install()
    latent_cache.install()
    settings, on_gpu = Settings.parse(config.additional_config), current_platform.is_cuda()
    runner = worker.model_runner
    original = runner.load_model

    def load(*inner: Any, **named: Any) -> Any:
        live = settings.staging != "none"
        recording: Any = recorded_checkpoint() if live else contextlib.nullcontext()
        with dequantized_mxfp4(config.model_config), recording as recorded, no_tensor_twice():
            result = original(*inner, **named)
        if settings.lm_head == "blockfp8" and get_pp_group().is_last_rank:
            from vllm_fp8ext.layers.lm_head import require_head

            require_head(without_adapters(runner.get_model()))
        if get_tensor_model_parallel_rank() == 0:
            for line in report(kept_layers(without_adapters(_models(runner)))):
                logger.info(line)
        if on_gpu:
            models = _models(runner)
            if is_available("fusion"):
                from vllm_fp8ext.compat.graphs import fusion

                fusion.name_kernels(config, models)
            if settings.kernels.takes_decode_attention and is_available("decode_attention"):
                from vllm_fp8ext.compat.speed.decode_attention import attach_all

                attach_all(models, config)
        if live:
            self.fp8ext_rank = _build(worker, config, runner, recorded)
        rank = getattr(self, "fp8ext_rank", None)
        foreign_loaders.close(worker, _models(runner), rank.loads if rank is not None else None)
        return result

    runner.load_model = load
    try:
        result = worker.load_model(*args, **kwargs)
    finally:
        del runner.load_model
    if on_gpu:
        _install_gpu_speed(settings)
        if is_available("warmup"):
            from vllm_fp8ext.compat.warmup.warmup import warm_up

            samples = worker.use_v2_model_runner and runner.is_last_pp_rank and not runner.is_pooling_model
            warm_up(_models(runner), _most_tokens(settings, config), config if samples else None)
    return result


def _install_gpu_speed(settings: Settings) -> None:
    """Wrap what makes steps faster, as far as this vLLM has it. The modules import FlashAttention's backend, or Triton."""
    if is_available("piecewise_capture_sizes"):
        from vllm_fp8ext.compat.speed import piecewise_capture_sizes

        piecewise_capture_sizes.install()
    if is_available("mixed_full_cudagraph"):
        from vllm_fp8ext.compat.speed import mixed_full_cudagraph

        mixed_full_cudagraph.install()
    if is_available("token_logprobs"):
        from vllm_fp8ext.compat.speed import token_logprobs

        token_logprobs.install()
    if settings.kernels.takes_decode_step_reuse and is_available("decode_step_reuse"):
        from vllm_fp8ext.compat.speed import decode_step_reuse

        decode_step_reuse.install()
    if settings.kernels.takes_decode_step_reuse and is_available("sampling_cudagraph"):
        from vllm_fp8ext.compat.speed import sampling_cudagraph

        sampling_cudagraph.install()


def _models(runner: Any) -> nn.Module:
    """Return the models that a worker runs, the draft model too."""
    models: list[nn.Module | None] = [runner.get_model(), runner.get_draft_model()]
    return nn.ModuleList(model for model in models if model is not None)


def _most_tokens(settings: Settings, config: VllmConfig) -> int:
    """Count the most tokens that the model gets at once: by a step, or by a calibration, all of whose prompts run
    together. With every policy but `static` an update can ask for one.
    """
    most: int = config.scheduler_config.max_num_batched_tokens
    scales = settings.kv_scales
    return max(most, scales.tokens) if scales is not None and scales.policy != "static" else most


def call(self: Any, number: int, method: str, *args: Any) -> RankReply:
    """Run one method of this worker's `Rank`; never raises. The reply tells what this process has compiled:
    not while the engine pauses, and not each time that a job is polled."""
    result = _run(getattr(self, "fp8ext_rank", None), method, args)
    idle = method not in (RankMethod.SWAP, RankMethod.WAIT_FOR_SWAP) and not isinstance(result, RankProgress)
    return RankReply(call=number, rank=self.worker.rank, result=result, compiled=counts() if idle else None)


@errors_as_results
def _run(rank: Any, method: str, args: tuple[Any, ...]) -> RankResult:
    if rank is None:
        message = "this server takes no updates: it was started with staging none, or from weights that were not recorded"
        raise UpdateError("updates-unavailable", message)
    result: RankResult = attrgetter(method)(rank)(*args)
    return result


def _build(worker: Any, config: VllmConfig, runner: Any, recorded: Any) -> Any:
    from vllm_fp8ext.compat.update import head_copies, latent_weights
    from vllm_fp8ext.compat.update.lora_layers import without_adapters
    from vllm_fp8ext.compat.update.model import checkpoint_specs, initialize_shadow, require_no_copies
    from vllm_fp8ext.compat.update.shadow_attention import attend_plainly
    from vllm_fp8ext.compat.update.tied_layers import tie_alike
    from vllm_fp8ext.compat.update.unloaded_names import DUMMY, expected_specs
    from vllm_fp8ext.compat.update.untried_layers import untried_layers
    from vllm_fp8ext.compat.update.weight_names import names_of
    from vllm_fp8ext.layers.lm_head import is_tied
    from vllm_fp8ext.update.worker.rank import Rank
    from vllm_fp8ext.update.worker.shadow import Shadow

    if config.load_config.load_format == DUMMY:
        recorded.specs = expected_specs(config.model_config, runner.get_model())
    if not recorded.specs:
        logger.warning(
            "blockfp8: no live updates, because load format %r does not tell what it loaded",
            config.load_config.load_format,
        )
        return None
    model = without_adapters(runner.get_model())
    device = next(model.parameters()).device
    with torch.inference_mode(False), torch.no_grad():
        latent_weights.follow_updates(model)
        shadow = initialize_shadow(config, device)
        for tree in (model, shadow):
            head_copies.follow_updates(tree)
        shares_experts = config.parallel_config.data_parallel_size > 1  # a core of a dense model has 1
        untried = untried_layers(
            shadow,
            Settings.parse(config.additional_config),
            shares_experts=shares_experts,
            stages=config.parallel_config.pipeline_parallel_size,
        )
        require_no_copies(shadow)
        specs = checkpoint_specs(recorded.specs, config.model_config.dtype)
        tied = is_tied(config.model_config)
        if tied:
            tie_alike(model, shadow)
        names = names_of(shadow, config.model_config.hf_config, tied=tied)
        inplace = Settings.parse(config.additional_config).staging == "inplace"
        cores, ranks = EngineCores.of(config), config.parallel_config.world_size
        number = cores.index * ranks + worker.rank
        beside = [one for one in (runner.get_draft_model(), runner.get_model()) if one not in (None, model)]
        weights = Shadow(model, shadow, specs, number, names, inplace=inplace, beside=beside)
        weights.require_equal(recorded.heads)
        kv = _kv_cache(model, weights, config, device)
    cost = weights.weight_swap.bytes
    if hasattr(runner, "model_memory_usage"):
        runner.model_memory_usage += cost
    per_block = sum(spec.page_size_bytes for spec in worker.get_kv_cache_spec().values())
    blocks = -(-cost // per_block) if per_block else 0
    if inplace:
        logger.warning(
            "blockfp8: staging inplace has no shadow: during an update nothing is generated, an update that fails half-way "
            "leaves the engine poisoned until a full one heals it, and there is no rollback"
        )
    logger.info(
        "blockfp8: the shadow takes %.2f GiB, as much as %d KV-cache blocks", cost / (1 << 30), blocks
    )
    kv_bytes = config.cache_config.kv_cache_memory_bytes
    if kv_bytes and device.type == "cuda":
        torch.cuda.empty_cache()  # what loading left with the allocator
        free, _ = torch.cuda.mem_get_info(device)
        if kv_bytes > free:
            raise ConfigError(
                f"--kv-cache-memory-bytes {kv_bytes}: only {free} bytes are free beside the model and its shadow "
                f"({cost} bytes): "
                'expected no more, or staging inplace or none (--additional-config \'{"fp8ext": {"staging": "inplace"}}\')'
            )
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


def _kv_cache(model: Any, shadow: Any, config: VllmConfig, device: torch.device) -> Any:
    """The FP8 KV cache's scales, computed before anything is cached; None without one."""
    from vllm_fp8ext.compat.update.kv_recorder import KvRecorder
    from vllm_fp8ext.compat.update.kv_rescale import CachedCodes
    from vllm_fp8ext.compat.update.kv_scales import attention_layers, gather, kv_scales_of, owners_of_kv
    from vllm_fp8ext.compat.update.shadow_attention import attend_plainly
    from vllm_fp8ext.update.contract.kv_request import check_prompts
    from vllm_fp8ext.update.contract.kv_tokens import choose
    from vllm_fp8ext.update.worker.kv_scales import RankKv

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
