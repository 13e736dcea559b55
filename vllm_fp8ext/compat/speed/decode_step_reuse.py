# SPDX-License-Identifier: Apache-2.0
"""Prepares a decode step of the same requests as the previous one by one launch.

Layers with sliding windows have block tables of their own: one launch for each such group of layers.

vLLM makes everything anew, by four launches and some thirty small operations, for which such a step of a small model waits.
`DefaultModelState.prepare_attn` makes metadata that no one reads behind a graph that holds our attention alone;
`add_requests` brings the sampler's settings to the GPU in every step. `capture_model` tries the launch, and after
`_dummy_run` no previous step is kept.
"""

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import CUDAGraphMode

from vllm_fp8ext.compat.speed.decode_prefill_split import takes_all
from vllm_fp8ext.compat.speed.supported_engines import is_plain
from vllm_fp8ext.compat.wrapping import wrap
from vllm_fp8ext.config import METHOD, Settings
from vllm_fp8ext.kernels.runtime.step_inputs import Inputs, Requests, step_inputs

FEATURE: str = "decode_step_reuse"
WHY: str = (
    "Prepare steps of the same requests by one launch: vLLM makes every step anew, and small "
    "models wait for the host."
)
GAIN: str = (
    "with sampling_cudagraph 946 tokens/s instead of 465 with 1 request, 26,907 instead of "
    "24,198 with 128 (Qwen3-1.7B, FP8 KV cache, H200)"
)
REPLACES: tuple[str, ...] = (
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.prepare_inputs("
    "scheduler_output, batch_req_state, batch_desc)",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.prepare_attn(input_batch)",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.add_requests(scheduler_output)",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner._dummy_run",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.capture_model(profile_only)",
    "vllm.v1.worker.gpu.model_states.default:DefaultModelState.prepare_attn("
    "input_batch, cudagraph_mode, block_tables, slot_mappings, attn_groups, kv_cache_config, "
    "for_capture)",
)
USES: dict[str, tuple[str, ...]] = {
    "prepare steps of the same requests by one launch": (
        "vllm.v1.worker.gpu.input_batch:InputBatch("
        "idx_mapping, idx_mapping_np, expanded_idx_mapping, num_reqs_after_padding, "
        "num_tokens_after_padding, seq_lens_cpu_upper_bound, num_computed_tokens_np)",
        "vllm.v1.worker.gpu.block_table:BlockTables(block_sizes, cp_size, slot_mapping_enabled)",
    ),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM keeps what does not change from step to step"
SWITCH: tuple[str, object] = ("kernels.takes_decode_step_reuse", False)
GPU_ONLY: bool = True
PLAIN_ENGINES: bool = True
ONE_RANK: bool = True

PROCESSORS = 3
"""Number of logits processors in vLLM's own sampler.

Others may have something for the GPU in every step.
"""
_PREVIOUS, _TABLES, _METADATA = "fp8ext_previous_step", "fp8ext_tables", "fp8ext_metadata"
"""Attributes of a `GPUModelRunner`: `PreviousStep`, or None where its steps can't be reused;
of an `InputBatch`, for the steps that follow: tables and slots, and attention's metadata, each None where vLLM has to make
it.
"""


class PreviousStep:
    """The previous step, if each request had one new token and a graph held it."""

    def __init__(self) -> None:
        self.batch: Any = None
        """`InputBatch`; None after another step."""
        self._graph: Any = None

    def follows(self, scheduled: Any, step: Any, graph: Any) -> bool:
        """Tell whether a step has the same requests with one token more each."""
        batch = self.batch
        return bool(
            batch is not None
            and graph == self._graph
            and decodes(scheduled, step, graph)
            and not scheduled.scheduled_new_reqs
            and not scheduled.finished_req_ids
            and not scheduled.preempted_req_ids
            and not scheduled.scheduled_cached_reqs.resumed_req_ids
            and step.req_ids == batch.req_ids
            and np.array_equal(step.idx_mapping_np, batch.idx_mapping_np)
        )

    def take(self, batch: Any, graph: Any) -> None:
        """A step that was prepared by vLLM."""
        self.batch, self._graph = batch, graph
        setattr(batch, _TABLES, None)
        setattr(batch, _METADATA, None)

    def drop(self) -> None:
        """Another step came."""
        self.batch = self._graph = None

    def again(self, runner: Any) -> Any:
        """The same for the step that follows: what its requests have more is written where the graph reads it."""
        last = self.batch
        _launch(runner, last.idx_mapping, last.num_reqs, last.num_reqs_after_padding)
        batch = copy.copy(last)
        batch.num_computed_tokens_np = runner.req_states.num_computed_tokens_np[last.idx_mapping_np]
        longest = np.zeros(last.num_reqs_after_padding, dtype=np.int32)
        np.add(batch.num_computed_tokens_np, 1, out=longest[: last.num_reqs])
        batch.seq_lens_cpu_upper_bound = torch.from_numpy(longest)
        self.batch = batch
        return batch


def install() -> None:
    """Have the engines that were configured for it prepare them so. Idempotent."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    wrap(DefaultModelState, "prepare_attn", _wrap_prepare_metadata)
    wrap(GPUModelRunner, "capture_model", _wrap_capture_model)
    wrap(GPUModelRunner, "_dummy_run", _wrap_dummy_run)
    wrap(GPUModelRunner, "add_requests", _wrap_add_requests)
    wrap(GPUModelRunner, "prepare_inputs", _wrap_prepare_inputs)
    wrap(GPUModelRunner, "prepare_attn", _wrap_prepare_attn)


def decodes(scheduled: Any, step: Any, graph: Any) -> bool:
    """Tell whether a graph holds a step with one new token of each request.

    None of the tokens is of a prompt.
    """
    return bool(
        graph.cg_mode == CUDAGraphMode.FULL
        and graph.uniform_token_count == 1
        and not step.has_prefill
        and step.num_draft_tokens_np is None
        and not scheduled.has_structured_output_requests
    )


def previous_step(runner: Any) -> PreviousStep | None:
    """Return a runner's previous step; None where it is asked to keep nothing, or its steps need more than is known
    here.
    """
    if not hasattr(runner, _PREVIOUS):
        setattr(runner, _PREVIOUS, PreviousStep() if can_reuse(runner) else None)
    previous: PreviousStep | None = getattr(runner, _PREVIOUS)
    return previous


def is_configured(config: Any) -> bool:
    """Tell whether an engine of this `VllmConfig` is ours and reuses steps.

    Its steps are told by its requests' tokens and pages alone.
    """
    return bool(
        config.model_config.quantization == METHOD
        and Settings.parse(config.additional_config).kernels.takes_decode_step_reuse
        and config.parallel_config.tensor_parallel_size == 1
        and is_plain(config)
        and config.kv_transfer_config is None
        and config.model_config.rswa_window is None
    )


def can_reuse(runner: Any) -> bool:
    """Tell whether a runner's steps can be reused."""
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    tables, state = runner.block_tables, runner.model_state
    return bool(
        is_configured(runner.vllm_config)
        and tables.num_kv_cache_groups >= 1
        and tables.cp_size == 1
        and all(tables._slot_mapping_enabled)
        and type(state) is DefaultModelState  # which makes embeddings and positions of MRoPE in each step
        and state.num_new_sampled_tokens_per_step == 1
        and runner.fast_prefill is None
        and len(runner.sampler.logits_processors) == PROCESSORS
    )


def _launch(runner: Any, places_R: Tensor, count: int, padded: int) -> None:
    """Write the step's inputs, once for each group of layers that share block tables.

    Each launch writes the same tokens.
    """
    states, buffers, tables = runner.req_states, runner.input_buffers, runner.block_tables
    for group, page in enumerate(tables.block_sizes):
        step_inputs(
            places_R,
            Requests(
                states.num_computed_tokens.gpu,
                states.last_sampled_tokens,
                tables.block_tables[group].gpu,
                tables.num_blocks.gpu[group],
            ),
            Inputs(
                buffers.input_ids,
                buffers.positions,
                buffers.query_start_loc,
                buffers.seq_lens,
                tables.input_block_tables[group],
                tables.slot_mappings[group],
            ),
            count,
            padded,
            page,
        )


def _wrap_capture_model(original: Any) -> Any:
    def capture_model(self: Any, *, profile_only: bool = False) -> int:
        taken: int = original(self, profile_only=profile_only)
        if not profile_only and previous_step(self) is not None:  # with no requests, so that it is compiled
            _launch(self, torch.zeros(1, dtype=torch.int64, device=self.device), 0, 1)
        return taken

    return capture_model


def _wrap_dummy_run(original: Any) -> Any:
    def _dummy_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        last: PreviousStep | None = getattr(self, _PREVIOUS, None)
        if last is not None:
            last.drop()
        return original(self, *args, **kwargs)

    return _dummy_run


def _wrap_add_requests(original: Any) -> Any:
    def add_requests(self: Any, scheduled: Any) -> None:
        if scheduled.scheduled_new_reqs or previous_step(self) is None:
            original(self, scheduled)

    return add_requests


def _wrap_prepare_inputs(original: Any) -> Any:
    def prepare_inputs(self: Any, scheduled: Any, step: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
        last = previous_step(self)
        if last is not None and last.follows(scheduled, step, graph):
            return last.again(self)
        batch = original(self, scheduled, step, graph, *args, **kwargs)
        if last is not None:
            if decodes(scheduled, step, graph):
                last.take(batch, graph)
            else:
                last.drop()
        return batch

    return prepare_inputs


def _wrap_prepare_attn(original: Any) -> Any:
    def prepare_attn(self: Any, input_batch: Any) -> Any:
        made = getattr(input_batch, _TABLES, None)
        if made is None:
            made = original(self, input_batch)
            if hasattr(input_batch, _TABLES):
                setattr(input_batch, _TABLES, made)
        return made

    return prepare_attn


def _wrap_prepare_metadata(original: Any) -> Any:
    def prepare_attn(
        self: Any,
        input_batch: Any,
        cudagraph_mode: Any,
        block_tables: Any,
        slot_mappings: Any,
        attn_groups: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        made = getattr(input_batch, _METADATA, None)
        if made is None:
            inputs = input_batch, cudagraph_mode, block_tables, slot_mappings, attn_groups
            made = original(self, *inputs, *args, **kwargs)
            if hasattr(input_batch, _METADATA) and _needs_no_metadata(attn_groups):
                setattr(input_batch, _METADATA, made)
        return made

    return prepare_attn


def _needs_no_metadata(groups: Any) -> bool:
    """Tell whether nothing is computed for attention before a graph of requests that decode."""
    each = [one for group in groups for one in group]
    return all(
        one.kernel_block_size is None and all(takes_all(builder) for builder in one.metadata_builders)
        for one in each
    )
