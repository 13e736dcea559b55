# SPDX-License-Identifier: Apache-2.0
"""Samples the tokens of a step that decodes by one CUDA graph.

To launch the output layer and vLLM's sampler takes the host as long as a small model's step takes the GPU. A graph
samples for requests that change logits by their temperature alone (without penalties, masks and structured outputs),
with none, one or two log-probabilities a token; what it holds is vLLM's own. After `capture_model` it is captured, and
both `add_request` of the sampler tell of such requests.
"""

import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_fp8ext.compat.speed import decode_step_reuse
from vllm_fp8ext.compat.speed.samplers import Samplers, SamplingGraph, scaled_places
from vllm_fp8ext.compat.wrapping import wrap
from vllm_fp8ext.log import log_once

FEATURE: str = "sampling_cudagraph"
WHY: str = (
    "Sample in CUDA graphs: vLLM launches the output layer and the sampler one by one, and "
    "small models wait for the host."
)
GAIN: str = "see decode_step_reuse"
REPLACES: tuple[str, ...] = (
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.capture_model(profile_only)",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample(hidden_states, input_batch, grammar_output)",
    "vllm.v1.worker.gpu.sample.states:SamplingStates.add_request(req_idx, sampling_params)",
    "vllm.v1.worker.gpu.sample.sampler:Sampler.add_request(req_idx, sampling_params)",
)
USES: dict[str, tuple[str, ...]] = {
    "sample in CUDA graphs": (
        "vllm.v1.worker.gpu.input_batch:InputBatch.make_dummy(num_reqs, num_tokens, input_buffers)",
        "vllm.config.model:ModelConfig.head_dtype",
        "vllm.v1.worker.gpu.sample.sampler:Sampler.needs_logits_processing",
        "vllm.v1.worker.gpu.sample.sampler:Sampler.logits_processors",
        "vllm.v1.worker.gpu.sample.sampler:Sampler.thinking_budget_state",
        "vllm.compilation.cudagraph_pool:capture_pool(pool, vllm_config)",
        "vllm.distributed.parallel_state:graph_capture(device)",
    ),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM's graphs of steps that decode sample"
SWITCH: tuple[str, object] = ("kernels.takes_decode_step_reuse", False)
GPU_ONLY: bool = True
PLAIN_ENGINES: bool = True
ONE_RANK: bool = True

logger = logging.getLogger("vllm.fp8ext")

LOGPROBS = None, 0, 1
"""Numbers of log-probabilities of each token, beside its own: what trainers ask for."""
SOME_TEMPERATURE = 0.5
"""Any for which vLLM launches what scales logits; it reads those of requests."""
REQUESTS = 256
"""Most of a step, by choice: with more the GPU takes longer than the host."""
OTHER_BYTES = 64 << 20
"""Bytes of graphs, beside their logits: cuBLAS's workspace, and what they are themselves."""
_SAMPLERS = "fp8ext_samplers"
"""Attribute of a `ModelCudaGraphManager`, whose graphs they follow: `Samplers`, once they are captured."""


def install() -> None:
    """Have the engines that were configured for it sample so. Idempotent."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.sample.states import SamplingStates

    wrap(SamplingStates, "add_request", _wrap_state_add_request)
    wrap(Sampler, "add_request", _wrap_add_request)
    wrap(GPUModelRunner, "capture_model", _wrap_capture_model)
    wrap(GPUModelRunner, "sample", _wrap_sample)


def _wrap_state_add_request(original: Any) -> Any:
    def add_request(self: Any, place: int, params: Any) -> bool:
        """Nothing is asked of logits here that a temperature alone asks."""
        needs: bool = original(self, place, params)
        masks = self.min_p.np[place] or self.top_k.np[place] != self.vocab_size or self.top_p.np[place] != 1.0
        scaled_places(self)[place] = needs and not masks
        return bool(needs and masks)

    return add_request


def _wrap_add_request(original: Any) -> Any:
    def add_request(self: Any, place: int, params: Any) -> None:
        original(self, place, params)
        needs, scaled = self.needs_logits_processing, scaled_places(self.sampling_states)
        needs[place], scaled[place] = needs[place] | scaled[place], scaled[place] & ~needs[place]

    return add_request


def _can_sample(runner: Any) -> bool:
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    sampler = runner.sampler
    return bool(
        decode_step_reuse.previous_step(runner) is not None
        and runner.batch_sharder is None
        and type(sampler) is Sampler
        and sampler.trace_replay_state is None
        and not sampler.compute_nans
        and not sampler.return_sampling_mask
    )


def _bytes(runner: Any) -> int:
    """About what the graphs will take, for which the KV cache leaves room: logits, also in FP32, which are scaled."""
    rows = min(REQUESTS, runner.max_num_reqs)
    logits_bytes = runner.model_config.head_dtype.itemsize
    return int(rows * runner.vocab_size * (logits_bytes + 4)) + OTHER_BYTES


def _wrap_capture_model(original: Any) -> Any:
    def capture_model(self: Any, *, profile_only: bool = False) -> int:
        taken: int = original(self, profile_only=profile_only)
        if profile_only:
            return taken + (_bytes(self) if decode_step_reuse.is_configured(self.vllm_config) else 0)
        return taken + (_capture(self) if _can_sample(self) else 0)

    return capture_model


def _capture(runner: Any) -> int:
    """Have the graphs beside the model's; the bytes that they take."""
    free = torch.cuda.mem_get_info()[0]
    try:
        samplers = _capture_samplers(runner)
    except Exception as error:  # out of memory, or logits that no graph can hold
        logger.warning("blockfp8: steps are sampled without CUDA graphs: %s", error)
        return 0
    taken: int = free - torch.cuda.mem_get_info()[0]
    setattr(runner.cudagraph_manager, _SAMPLERS, samplers)
    if samplers.graphs:
        most, gib = max(rows for rows, *_ in samplers.graphs), taken / (1 << 30)
        log_once(f"blockfp8: steps that decode up to {most} requests sample in CUDA graphs ({gib:.2f} GiB)")
    return taken


def _wrap_sample(original: Any) -> Any:
    def sample(self: Any, hidden_states: Tensor, input_batch: Any, grammar_output: Any) -> Any:
        samplers: Samplers | None = getattr(self.cudagraph_manager, _SAMPLERS, None)
        last = decode_step_reuse.previous_step(self)
        ours = last is not None and last.batch is input_batch and grammar_output is None
        sampled = samplers.sample(self, input_batch) if ours and samplers is not None else None
        return sampled or original(self, hidden_states, input_batch, grammar_output)

    return sample


@torch.inference_mode()
def _capture_samplers(runner: Any) -> Samplers:
    from vllm.compilation.cudagraph_pool import capture_pool
    from vllm.distributed.parallel_state import graph_capture
    from vllm.utils.gc_utils import freeze_gc_for_cudagraph_capture
    from vllm.v1.worker.gpu.input_batch import InputBatch

    manager, buffers = runner.cudagraph_manager, runner.input_buffers
    samplers = Samplers(runner.max_num_reqs, runner.device)
    decode = [graph.num_tokens for graph in manager.graphs if graph.uniform_token_count == 1]
    rows = {count for count in decode if count <= REQUESTS}
    # The model's graphs must not compute where tokens wait to be copied to the host: a pool apart; and where vLLM has one for
    # all, which it frees in sleep, another stream.
    apart = torch.cuda.graph_pool_handle()
    with freeze_gc_for_cudagraph_capture(), graph_capture(device=runner.device) as where:
        for count in sorted(rows, reverse=True):
            dummy = InputBatch.make_dummy(count, count, buffers)
            places = samplers.places_R[:count]
            batch = dataclasses.replace(
                dummy,
                idx_mapping=places,
                expanded_idx_mapping=places,
                idx_mapping_np=np.zeros(
                    count, dtype=np.intp
                ),  # the first place, whose settings `_settings` makes
            )
            for logprobs, scaled in itertools.product(LOGPROBS, (False, True)):
                with _settings(runner, samplers, logprobs, scaled=scaled):
                    runner.sample(manager.hidden_states[:count], batch, None)
                    graph = torch.cuda.CUDAGraph()
                    with (
                        capture_pool(apart, runner.vllm_config) as pool,
                        torch.cuda.graph(graph, pool, stream=where.stream),
                    ):
                        sampled, _, _ = runner.sample(manager.hidden_states[:count], batch, None)
                samplers.graphs[count, logprobs, scaled] = SamplingGraph(graph, sampled, batch)
    return samplers


@contextlib.contextmanager
def _settings(runner: Any, samplers: Samplers, logprobs: int | None, *, scaled: bool) -> Iterator[None]:
    """Make the first place that of a request which leaves logits, or is `scaled`: changes them by its temperature; what
    the sampler reads on the GPU is what stays where it is: vLLM's own buffers take turns. What else could change
    logits is not there.
    """
    from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS

    sampler = runner.sampler
    states = sampler.sampling_states
    values = [
        (sampler.needs_logits_processing, scaled),
        (states.temperature.np, SOME_TEMPERATURE),
        (states.min_p.np, 0.0),
        (states.top_k.np, states.vocab_size),
        (states.top_p.np, 1.0),
        (states.num_logprobs, NO_LOGPROBS if logprobs is None else logprobs),
        (sampler.logprob_token_ids_state.num_token_ids.np, 0),
    ]
    before = [array[0] for array, _ in values]
    attributes = [
        (states.temperature, "gpu", samplers.temperature_S),
        (states.seeds, "gpu", samplers.seeds_S),
        (runner.req_states.prefill_len, "gpu", samplers.prompts_S),
        (sampler, "logits_processors", []),
        (sampler, "thinking_budget_state", SimpleNamespace(apply=lambda *_: None)),
    ]
    attribute_values = [getattr(holder, name) for holder, name, _ in attributes]
    try:
        for array, value in values:
            array[0] = value
        for holder, name, steady in attributes:
            setattr(holder, name, steady)
        yield
    finally:
        for (array, _), value in zip(values, before, strict=True):
            array[0] = value
        for (holder, name, _), old in zip(attributes, attribute_values, strict=True):
            setattr(holder, name, old)
