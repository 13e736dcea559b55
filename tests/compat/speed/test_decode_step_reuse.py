# SPDX-License-Identifier: Apache-2.0
"""Steps of the requests of the step before: when they are prepared by one launch, and what that makes of them. That a GPU
samples the same tokens, `tests/gpu` shows."""

import dataclasses
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import SamplingStates

from vllm_fp8ext.compat.speed import decode_prefill_split, decode_step_reuse, sampling_cudagraph

PLACES, PAGES, PAGE = 8, 6, 4
REQUESTS, PADDED = 3, 4
DECODE = BatchExecutionDescriptor(CUDAGraphMode.FULL, PADDED, PADDED, uniform_token_count=1)


class Runner:
    """With the state of vLLM's, of three requests, and its functions replaced: what they were counts its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        computed = torch.tensor([9, 9, 3, 9, 7, 9, 9, 12], dtype=torch.int32)
        tables = torch.arange(100, 100 + PLACES * PAGES, dtype=torch.int32).view(PLACES, PAGES)
        self.req_states = SimpleNamespace(
            num_computed_tokens=SimpleNamespace(gpu=computed),
            num_computed_tokens_np=computed.numpy(),
            last_sampled_tokens=torch.arange(50, 50 + PLACES).view(PLACES, 1),
        )
        self.block_tables = SimpleNamespace(
            block_tables=[SimpleNamespace(gpu=tables)],
            num_blocks=SimpleNamespace(gpu=(computed // PAGE + 1)[None]),
            input_block_tables=[torch.zeros(PLACES, PAGES, dtype=torch.int32)],
            slot_mappings=torch.zeros(1, 16, dtype=torch.int64),
            block_sizes=[PAGE],
        )
        self.input_buffers = InputBuffers(PLACES, 16, torch.device("cpu"))
        self.device = torch.device("cpu")
        setattr(self, decode_step_reuse._PREVIOUS, decode_step_reuse.PreviousStep())
        for name, wrapper in (
            ("prepare_inputs", decode_step_reuse._wrap_prepare_inputs),
            ("prepare_attn", decode_step_reuse._wrap_prepare_attn),
            ("add_requests", decode_step_reuse._wrap_add_requests),
            ("capture_model", decode_step_reuse._wrap_capture_model),
        ):
            setattr(self, name, wrapper(getattr(self, f"_{name}")).__get__(self))

    @staticmethod
    def _capture_model(self: Any, *, profile_only: bool) -> int:
        self.calls.append(f"capture {profile_only}")
        return 5

    @staticmethod
    def _add_requests(self: Any, scheduled: Any) -> None:
        self.calls.append("add")

    @staticmethod
    def _prepare_inputs(self: Any, scheduled: Any, step: Any, graph: Any, loras: int) -> InputBatch:
        self.calls.append("inputs")
        count = len(step.req_ids)
        dummy = InputBatch.make_dummy(count, count, self.input_buffers)
        return dataclasses.replace(
            dummy,
            req_ids=step.req_ids,
            idx_mapping=torch.tensor(step.idx_mapping_np, dtype=torch.int64),
            idx_mapping_np=step.idx_mapping_np,
            num_reqs_after_padding=graph.num_reqs or count,
            num_tokens_after_padding=graph.num_tokens,
        )

    @staticmethod
    def _prepare_attn(self: Any, input_batch: Any) -> Any:
        self.calls.append("attention")
        return object()

    def step(self, scheduled: Any, step: Any, graph: Any = DECODE) -> tuple[Any, Any]:
        batch = self.prepare_inputs(scheduled, step, graph, 0)  # type: ignore[attr-defined]
        return batch, self.prepare_attn(batch)  # type: ignore[attr-defined]


def scheduled(**more: Any) -> Any:
    output = SchedulerOutput.make_empty()
    for name, value in more.items():
        setattr(output, name, value)
    return output


def resumed(output: Any) -> Any:
    output.scheduled_cached_reqs.resumed_req_ids = {"b"}
    return output


def step(
    names: tuple[str, ...] = ("a", "b", "c"), places: tuple[int, ...] = (4, 2, 7), **more: Any
) -> SimpleNamespace:
    state = {"has_prefill": False, "num_draft_tokens_np": None}
    return SimpleNamespace(req_ids=list(names), idx_mapping_np=np.array(places), **{**state, **more})


def test_a_step_that_follows_is_prepared_by_one_launch() -> None:
    runner = Runner()
    first, tables = runner.step(scheduled(), step())
    for _ in range(2):
        runner.req_states.num_computed_tokens.gpu += 1  # numpy shares it
        runner.req_states.last_sampled_tokens += 100
        runner.block_tables.num_blocks = SimpleNamespace(gpu=runner.block_tables.num_blocks.gpu.clone())
        batch, attention = runner.step(scheduled(), step())
        assert attention is tables
    assert runner.calls == ["inputs", "attention"]
    assert batch is not first
    assert batch.idx_mapping is first.idx_mapping
    buffers, slots = runner.input_buffers, runner.block_tables.slot_mappings[0]
    assert buffers.input_ids[:3].tolist() == [254, 252, 257]
    assert buffers.positions[:3].tolist() == [9, 5, 14]
    assert buffers.seq_lens.tolist() == [10, 6, 15, 0, 0, 0, 0, 0]
    assert buffers.query_start_loc.tolist() == [0, 1, 2, 3, 3, 3, 3, 3, 3]
    assert slots[:4].tolist() == [126 * 4 + 1, 113 * 4 + 1, 145 * 4 + 2, -1]
    assert runner.block_tables.input_block_tables[0][1, :1].tolist() == [112]
    assert batch.num_computed_tokens_np.tolist() == [9, 5, 14]
    assert batch.seq_lens_cpu_upper_bound.tolist() == [10, 6, 15, 0]
    assert first.num_computed_tokens_np.tolist() == [0, 0, 0], "the step before is as it was"


OTHERS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "a new request": lambda: (scheduled(scheduled_new_reqs=[object()]), step()),
    "one that ended": lambda: (scheduled(finished_req_ids={"z"}), step()),
    "one that was preempted": lambda: (scheduled(preempted_req_ids={"z"}), step()),
    "one that goes on": lambda: (resumed(scheduled()), step()),
    "structured outputs": lambda: (scheduled(has_structured_output_requests=True), step()),
    "one fewer": lambda: (scheduled(), step(("a", "b"), (4, 2))),
    "another request": lambda: (scheduled(), step(("a", "b", "d"))),
    "another place": lambda: (scheduled(), step(places=(4, 3, 7))),
    "a prompt": lambda: (scheduled(), step(has_prefill=True)),
    "drafts": lambda: (scheduled(), step(num_draft_tokens_np=np.zeros(3))),
    "another graph": lambda: (scheduled(), step(), dataclasses.replace(DECODE, num_tokens=8)),
    "no graph": lambda: (scheduled(), step(), dataclasses.replace(DECODE, cg_mode=CUDAGraphMode.NONE)),
    "a graph for prompts": lambda: (
        scheduled(),
        step(),
        dataclasses.replace(DECODE, uniform_token_count=None),
    ),
}


@pytest.mark.parametrize("other", OTHERS)
def test_any_other_step_is_prepared_by_vllm(other: str) -> None:
    runner = Runner()
    runner.step(scheduled(), step())
    runner.step(*OTHERS[other]())
    assert runner.calls == ["inputs", "attention"] * 2


@pytest.mark.parametrize(
    "other", ["structured outputs", "a prompt", "drafts", "no graph", "a graph for prompts"]
)
def test_after_a_step_of_another_kind_nothing_follows(other: str) -> None:
    runner = Runner()
    runner.step(scheduled(), step())
    runner.step(*OTHERS[other]())
    runner.step(scheduled(), step())
    assert runner.calls == ["inputs", "attention"] * 3


def test_requests_that_came_are_followed_in_turn() -> None:
    runner = Runner()
    runner.step(scheduled(), step())
    _, tables = runner.step(scheduled(scheduled_new_reqs=[object()]), step(("a", "b", "d"), (4, 2, 0)))
    batch, attention = runner.step(scheduled(), step(("a", "b", "d"), (4, 2, 0)))
    assert runner.calls == ["inputs", "attention"] * 2
    assert attention is tables
    assert batch.req_ids == ["a", "b", "d"]
    assert runner.input_buffers.positions[:3].tolist() == [7, 3, 9]


def test_settings_go_to_the_gpu_with_new_requests_alone() -> None:
    runner: Any = Runner()
    runner.add_requests(scheduled())
    assert runner.calls == []
    runner.add_requests(scheduled(scheduled_new_reqs=[object()]))
    assert runner.calls == ["add"]
    setattr(runner, decode_step_reuse._PREVIOUS, None)
    runner.add_requests(scheduled())
    assert runner.calls == ["add", "add"]


def test_after_a_dummy_run_a_step_is_made_anew() -> None:
    runner: Any = Runner()
    runner.step(scheduled(), step())
    assert (
        decode_step_reuse._wrap_dummy_run(lambda self, tokens, **_: tokens)(runner, 7, is_profile=True) == 7
    )
    runner.step(scheduled(), step())
    assert runner.calls == ["inputs", "attention"] * 2
    runner.step(scheduled(), step())
    assert runner.calls == ["inputs", "attention"] * 2
    early = SimpleNamespace()  # nothing is asked of a runner that has no KV cache yet
    assert decode_step_reuse._wrap_dummy_run(lambda self: 5)(early) == 5
    assert vars(early) == {}


def test_an_engine_that_keeps_nothing_runs_vllm_s() -> None:
    runner: Any = Runner()
    setattr(runner, decode_step_reuse._PREVIOUS, None)
    for _ in range(2):
        runner.step(scheduled(), step())
    assert runner.calls == ["inputs", "attention"] * 2


def test_the_launch_is_tried_where_graphs_are_captured() -> None:
    runner: Any = Runner()
    runner.input_buffers.seq_lens += 5
    assert runner.capture_model(profile_only=True) == 5
    assert runner.input_buffers.seq_lens.tolist() == [5] * PLACES
    assert runner.capture_model() == 5
    assert runner.input_buffers.seq_lens.tolist() == [0] * PLACES
    assert runner.calls == ["capture True", "capture False"]


def engine(**changed: Any) -> Any:
    """A runner whose steps are taken, but for what is changed, by its path."""
    state: Any = object.__new__(DefaultModelState)
    runner: Any = SimpleNamespace(
        block_tables=SimpleNamespace(num_kv_cache_groups=1, cp_size=1, _slot_mapping_enabled=[True]),
        model_state=state,
        fast_prefill=None,
        sampler=SimpleNamespace(logits_processors=[1, 2, 3]),
        vllm_config=SimpleNamespace(
            additional_config={},
            parallel_config=SimpleNamespace(
                tensor_parallel_size=1,
                pipeline_parallel_size=1,
                data_parallel_size=1,
                prefill_context_parallel_size=1,
            ),
            kv_transfer_config=None,
            lora_config=None,
            speculative_config=None,
            model_config=SimpleNamespace(
                quantization="blockfp8",
                rswa_window=None,
                runner_type="generate",
                is_mm_prefix_lm=False,
                is_moe=True,
                enable_prompt_embeds=False,
            ),
        ),
    )
    for path, value in changed.items():
        *holders, name = path.split(".")
        setattr(functools.reduce(getattr, holders, runner), name, value)
    return runner


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("vllm_config.additional_config", {"fp8ext": {"kernels": {"decode_step_reuse": False}}}),
        ("vllm_config.additional_config", {"fp8ext": {"kernels": {"batch_invariant": True}}}),
        ("vllm_config.model_config.quantization", "fp8_per_block"),
        ("vllm_config.parallel_config.tensor_parallel_size", 2),
        ("block_tables.num_kv_cache_groups", 0),
        ("block_tables.cp_size", 2),
        ("block_tables._slot_mapping_enabled", [True, False]),
        ("model_state", object()),
        ("model_state.num_new_sampled_tokens_per_step", 0),
        ("fast_prefill", object()),
        ("vllm_config.parallel_config.pipeline_parallel_size", 2),
        ("vllm_config.parallel_config.data_parallel_size", 2),
        ("vllm_config.parallel_config.prefill_context_parallel_size", 2),
        ("vllm_config.kv_transfer_config", object()),
        ("vllm_config.lora_config", object()),
        ("vllm_config.speculative_config", object()),
        ("vllm_config.model_config.rswa_window", 5),
        ("sampler.logits_processors", [1, 2, 3, "mine"]),
        ("vllm_config.model_config.runner_type", "pooling"),
        ("vllm_config.model_config.is_mm_prefix_lm", True),
        ("vllm_config.model_config.enable_prompt_embeds", True),
    ],
)
def test_engines_whose_steps_need_more_are_left_to_vllm(path: str, value: Any) -> None:
    plain = engine()
    assert decode_step_reuse.previous_step(plain) is decode_step_reuse.previous_step(plain)
    assert isinstance(decode_step_reuse.previous_step(plain), decode_step_reuse.PreviousStep)
    assert decode_step_reuse.previous_step(engine(**{path: value})) is None


def test_layers_with_windows_have_block_tables_of_their_own() -> None:
    """vLLM has a group for these and one for the others, with pages of other sizes."""
    two = engine(
        **{"block_tables.num_kv_cache_groups": 2, "block_tables._slot_mapping_enabled": [True, True]}
    )
    assert decode_step_reuse.previous_step(two) is not None
    runner = Runner()
    tables, computed = runner.block_tables, runner.req_states.num_computed_tokens.gpu
    wide = torch.arange(500, 500 + PLACES * 3, dtype=torch.int32).view(PLACES, 3)
    tables.block_tables.append(SimpleNamespace(gpu=wide))
    tables.input_block_tables.append(torch.zeros(PLACES, 3, dtype=torch.int32))
    tables.num_blocks.gpu = torch.stack([computed // PAGE + 1, computed // 8 + 1])
    tables.slot_mappings = torch.zeros(2, 16, dtype=torch.int64)
    tables.block_sizes.append(8)
    runner.step(scheduled(), step())
    runner.step(scheduled(), step())
    assert runner.calls == ["inputs", "attention"]
    buffers, slots = runner.input_buffers, tables.slot_mappings
    assert buffers.positions[:3].tolist() == [7, 3, 12]
    assert buffers.seq_lens[:4].tolist() == [8, 4, 13, 0]
    assert slots[0, :4].tolist() == [125 * 4 + 3, 112 * 4 + 3, 145 * 4, -1]
    assert slots[1, :4].tolist() == [512 * 8 + 7, 506 * 8 + 3, 522 * 8 + 4, -1]
    assert tables.input_block_tables[1][:3, :1].tolist() == [[512], [506], [521]]


@pytest.mark.parametrize(
    ("taken", "kernel_block", "made"), [(True, None, 1), (False, None, 3), (True, 16, 3)]
)
def test_metadata_of_attention_is_made_once_where_no_one_reads_it(
    taken: bool, kernel_block: int | None, made: int
) -> None:
    runner = Runner()
    builder = SimpleNamespace(**{decode_prefill_split._TAKEN: taken})
    groups = [[SimpleNamespace(kernel_block_size=kernel_block, metadata_builders=[builder])]]
    told: list[object] = []

    def original(
        self: Any, batch: Any, mode: Any, tables: Any, slots: Any, groups: Any, *more: Any, last: bool
    ) -> object:
        assert (tables, slots, more, last) == ("tables", "slots", ("config",), True)
        told.append(object())
        return told[-1]

    prepare = decode_step_reuse._wrap_prepare_metadata(original)
    for _ in range(3):
        batch, _ = runner.step(scheduled(), step())
        result = prepare(None, batch, "FULL", "tables", "slots", groups, "config", last=True)
        assert result is told[-1]
    assert len(told) == made
    other = InputBatch.make_dummy(3, 3, runner.input_buffers)
    for _ in range(2):
        prepare(None, other, "FULL", "tables", "slots", groups, "config", last=True)
    assert len(told) == made + 2, "of other steps always"


def test_both_are_around_what_captures_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once each, whoever was there first."""
    names = "capture_model", "_dummy_run", "add_requests", "prepare_inputs", "prepare_attn", "sample"
    for name in names:
        monkeypatch.setattr(GPUModelRunner, name, lambda *_, **__: 3)
    for owner, name in (
        (DefaultModelState, "prepare_attn"),
        (Sampler, "add_request"),
        (SamplingStates, "add_request"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    for _ in range(2):
        decode_step_reuse.install()
        sampling_cudagraph.install()
    captures: Any = GPUModelRunner.capture_model
    assert len(captures.fp8ext_wrappers) == 2
    assert captures.__wrapped__.__wrapped__.__name__ == "<lambda>"
    assert not hasattr(captures.__wrapped__.__wrapped__, "__wrapped__")
    for name in names[1:]:
        assert len(getattr(GPUModelRunner, name).fp8ext_wrappers) == 1
