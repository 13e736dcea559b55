# SPDX-License-Identifier: Apache-2.0
"""Which steps replay one graph: vLLM's own lists of graphs, with more. That they say the same, `tests/gpu` shows."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.config import CUDAGraphMode
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from vllm_fp8ext.compat.speed import decode_prefill_split, mixed_full_cudagraph

from .graph_manager import graph_manager

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE


class Layer(AttentionLayerBase):
    """Of attention, ours or not."""

    def __init__(self, *, is_taken: bool = True) -> None:
        self.impl = SimpleNamespace()
        if is_taken:
            decode_prefill_split.mark_decodes(self.impl)

    def get_attn_backend(self) -> Any:
        raise NotImplementedError

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        raise NotImplementedError


def manager(
    *,
    layers: tuple[Any, ...] = (Layer(), Layer(), "experts"),
    settings: dict[str, Any] | None = None,
    changed: dict[str, dict[str, Any]] | None = None,
    **given: Any,
) -> Any:
    """One of vLLM's, with our graphs; `changed`: parts of its configuration."""
    made = graph_manager(**given)
    made._lora_dispatch_map, made._max_lora_case, made._graphs_captured = {}, 0, True
    config = made.vllm_config
    config.additional_config["fp8ext"] = settings or {}
    config.compilation_config.static_forward_context = dict(enumerate(layers))
    config.parallel_config = SimpleNamespace(
        pipeline_parallel_size=1, data_parallel_size=1, prefill_context_parallel_size=1
    )
    config.lora_config = None
    vars(config.model_config).update(
        runner_type="generate", is_mm_prefix_lm=False, is_moe=True, enable_prompt_embeds=False
    )
    for part, values in (changed or {}).items():
        vars(getattr(config, part) if part else config).update(values)
    mixed_full_cudagraph.add(made)
    return made


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in (
        (ModelCudaGraphManager, "__init__"),
        (ModelCudaGraphManager, "dispatch"),
        (GPUModelRunner, "gather_batch_req_state"),
        (DefaultModelState, "prepare_attn"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    mixed_full_cudagraph.install()


def wholes(cudagraphs: Any) -> list[tuple[int, int | None]]:
    """Tokens and requests of the graphs that are added, the smallest first."""
    descriptions = cudagraphs._capture_descs.get(FULL, [])
    return sorted((one.num_tokens, one.num_reqs) for one in descriptions if one.max_query_len)


def test_attention_is_told_of_them() -> None:
    """Else graphs would hold FlashAttention for requests that decode."""
    assert (
        "vllm_fp8ext.compat.speed.mixed_full_cudagraph._wrap_prepare_attn"
        in DefaultModelState.prepare_attn.fp8ext_wrappers
    )


def test_graphs_of_whole_steps_as_far_as_pieces_reach() -> None:
    sizes = [16, 32, 64, 128, 160, 192, 224, 256, 320, 384, 448, 512]
    cudagraphs = manager()
    assert wholes(cudagraphs) == [(size, min(size, 256)) for size in sizes]
    alone = [one.num_tokens for one in cudagraphs._capture_descs[FULL] if not one.max_query_len]
    assert alone == [512, 64, 1], "vLLM's own stay"
    assert [one.num_tokens for one in cudagraphs._capture_descs[PIECEWISE]] == [512, 64, 1]


@pytest.mark.parametrize(
    ("sizes", "requests", "expected"),
    [
        ((1, 64, 512), 1024, [(512, False), (64, False), (1, False), (512, True), (448, True)]),
        ((1, 64, 1024), 64, [(1024, True), (64, False), (1, False), (896, True), (768, True)]),
    ],
)
def test_the_largest_is_captured_first(
    sizes: tuple[int, ...], requests: int, expected: list[tuple[int, bool]]
) -> None:
    """And then vLLM's own, of requests that there can be."""
    order = manager(sizes=sizes, requests=requests)._capture_descs[FULL]
    assert [(one.num_tokens, one.max_query_len is not None) for one in order[:5]] == expected


def test_no_graph_is_larger_than_a_step_can_be() -> None:
    """Of as many requests as there can be, none longer than they are, or than attention takes."""
    assert wholes(manager(requests=2, longest=100))[-1] == (200, 2)
    longer = manager(sizes=(1, 8192), requests=1, longest=10_000)
    assert wholes(longer)[-1] == (decode_prefill_split.SHORT, 1)
    assert wholes(manager(sizes=(1, 8))) == []


@pytest.mark.parametrize(
    "unchanged",
    [
        {"tokens": 0},
        {"settings": {"kernels": {"mixed_full_cudagraph": False}}},
        {"settings": {"kv_scales": "history"}},
        {"layers": ()},
        {"layers": ("experts",)},
        {"layers": (Layer(), Layer(is_taken=False))},
        {"mode": CUDAGraphMode.FULL},
        {"mode": CUDAGraphMode.PIECEWISE},
        {"mode": CUDAGraphMode.FULL_DECODE_ONLY},
        {"mode": CUDAGraphMode.NONE},
        {"changed": {"parallel_config": {"pipeline_parallel_size": 2}}},
        {"changed": {"parallel_config": {"data_parallel_size": 2}}},
        {"changed": {"parallel_config": {"prefill_context_parallel_size": 2}}},
        {"changed": {"": {"lora_config": "adapters"}}},
        {"changed": {"": {"speculative_config": "drafts"}}},
        {"changed": {"model_config": {"runner_type": "pooling"}}},
        {"changed": {"model_config": {"is_mm_prefix_lm": True}}},
        {"changed": {"model_config": {"enable_prompt_embeds": True}}},
    ],
)
def test_where_nothing_is_added(unchanged: dict[str, Any]) -> None:
    cudagraphs = manager(**unchanged)
    assert wholes(cudagraphs) == []
    step(cudagraphs, [100])
    assert cudagraphs.dispatch(1, 100, None, 0).cg_mode == cudagraphs.cudagraph_mode.mixed_mode()


def test_engines_of_other_kinds_stay_as_they_are() -> None:
    """Whose additional configuration is not ours."""
    cudagraphs = manager()
    cudagraphs.vllm_config.additional_config = {"fp8ext": "another's"}
    cudagraphs._capture_descs = {}
    cudagraphs._init_candidates()
    mixed_full_cudagraph.add(cudagraphs)
    assert wholes(cudagraphs) == []


def step(
    cudagraphs: Any,
    new: list[int],
    cached: list[int] | None = None,
    *,
    prompts: bool = True,
    images: dict[str, list[str]] | None = None,
) -> None:
    """Tell a manager of the step that it is asked about next, as vLLM's runner does. `images`: of requests, by place."""
    known = cached or [0] * len(new)
    state = SimpleNamespace(
        num_scheduled_tokens=np.array(new),
        idx_mapping_np=np.arange(len(new))[::-1],
        has_prefill=prompts,
        req_ids=[f"{place}" for place in range(len(new))],
        is_prefilling_np=np.array([count > 1 for count in new]),
    )
    runner = SimpleNamespace(
        cudagraph_manager=cudagraphs,
        req_states=SimpleNamespace(num_computed_tokens_np=np.array(known[::-1])),
        encoder_cache=None if images is None else SimpleNamespace(mm_features=images),
    )
    mixed_full_cudagraph._wrap_gather_batch_req_state(lambda *_: (state, None))(runner, "scheduled", False)


@pytest.mark.parametrize(
    ("new", "cached", "expected"),
    [
        ([100], [0], (FULL, 128)),
        ([512], [0], (FULL, 512)),
        ([2], [0], (FULL, 16)),
        ([1, 1, 30], [4095, 7, 0], (FULL, 32)),
        ([5, 100], [0, 3996], (FULL, 128)),
        ([5, 100], [0, 3997], (PIECEWISE, 512)),
        ([1, 1, 5, 100], [9000, 4096, 0, 3996], (FULL, 128)),
        ([5, 1], [0, 4096], (PIECEWISE, 64)),
        ([2] * 256, [0] * 256, (FULL, 512)),
        ([1] * 255 + [257], [0] * 256, (FULL, 512)),
        ([1] * 256 + [2], [0] * 257, (PIECEWISE, 512)),
        ([1, 1], [5, 6], (PIECEWISE, 64)),
        ([600], [0], (CUDAGraphMode.NONE, 600)),
    ],
)
def test_which_steps_replay_them(
    new: list[int], cached: list[int], expected: tuple[CUDAGraphMode, int]
) -> None:
    cudagraphs = manager()
    step(cudagraphs, new, cached)
    taken = cudagraphs.dispatch(len(new), sum(new), None, 0, max_query_len=None)
    assert (taken.cg_mode, taken.num_tokens) == expected
    cudagraphs._graphs_captured = False
    assert cudagraphs.dispatch(len(new), sum(new), None, 0).cg_mode == CUDAGraphMode.NONE


@pytest.mark.parametrize(
    ("images", "expected"),
    [
        ({}, FULL),
        ({"0": [], "1": []}, FULL),
        ({"0": ["of a request that decodes"], "1": []}, FULL),
        ({"0": [], "1": ["of a prompt"]}, PIECEWISE),
    ],
)
def test_a_step_with_images_is_none_of_ours(images: dict[str, list[str]], expected: CUDAGraphMode) -> None:
    cudagraphs = manager()
    step(cudagraphs, [1, 30], [50, 0], images=images)
    assert cudagraphs.dispatch(2, 31, None, 0, max_query_len=None).cg_mode == expected


def test_requests_that_decode_alone_have_vllm_s_graphs() -> None:
    cudagraphs = manager()
    step(cudagraphs, [1] * 40, prompts=False)
    taken = cudagraphs.dispatch(40, 40, 1, 0, max_query_len=1)
    assert (taken.cg_mode, taken.num_tokens, taken.max_query_len) == (FULL, 64, None)


def test_a_step_without_requests_is_none_of_ours() -> None:
    """As when vLLM warms up, right behind a step with a prompt."""
    cudagraphs = manager()
    step(cudagraphs, [100])
    runner = SimpleNamespace(cudagraph_manager=cudagraphs)
    assert mixed_full_cudagraph._wrap_gather_batch_req_state(lambda *_: (None, 3))(
        runner, "scheduled", True
    ) == (None, 3)
    assert cudagraphs.dispatch(1, 100, None, 0).cg_mode == PIECEWISE
    assert mixed_full_cudagraph._wrap_gather_batch_req_state(lambda *_: (None, 3))(
        SimpleNamespace(cudagraph_manager=None)
    ) == (
        None,
        3,
    )


def test_managers_are_given_them_as_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what stands before vLLM's own functions, once."""
    before = ModelCudaGraphManager.__init__, ModelCudaGraphManager.dispatch
    mixed_full_cudagraph.install()
    assert (ModelCudaGraphManager.__init__, ModelCudaGraphManager.dispatch) == before
    seen: list[Any] = []
    monkeypatch.setattr(mixed_full_cudagraph, "add", seen.append)
    made = object.__new__(ModelCudaGraphManager)
    mixed_full_cudagraph._wrap_init(lambda *_, **__: None)(made, "config")
    assert seen == [made]
