# SPDX-License-Identifier: Apache-2.0
"""Gives each worker its shadow, and a method through which the engine reaches it.

`WorkerWrapperBase.load_model` otherwise falls through to the worker.
"""

import contextlib
import logging
from operator import attrgetter
from typing import Any

from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
from vllm.platforms import current_platform
from vllm.v1.worker.worker_base import WorkerWrapperBase

from vllm_fp8ext.compat.features import adopt, is_available
from vllm_fp8ext.compat.update import cpu_conv, cpu_kv_rounding, foreign_loaders
from vllm_fp8ext.compat.update.owner_process import follow_engine
from vllm_fp8ext.compat.warmup import cpu_tiles
from vllm_fp8ext.compat.warmup.compilations import counts
from vllm_fp8ext.config import METHOD, Settings
from vllm_fp8ext.errors import UpdateError, errors_as_results
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
USES: dict[str, tuple[str, ...]] = {}
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
    from vllm_fp8ext.compat.update.rank_building import build_rank
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
            _give_kernels(_models(runner), config, settings)
        if live:
            self.fp8ext_rank = build_rank(worker, config, runner, recorded)
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


def _give_kernels(models: nn.Module, config: VllmConfig, settings: Settings) -> None:
    """Have layers of loaded models run our kernels, before graphs are compiled."""
    if is_available("fusion"):
        from vllm_fp8ext.compat.graphs import fusion

        fusion.name_kernels(config, models)
    if settings.kernels.takes_decode_attention and is_available("decode_attention"):
        from vllm_fp8ext.compat.speed.decode_attention import attach_all

        attach_all(models, config)


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
