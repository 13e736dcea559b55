# SPDX-License-Identifier: Apache-2.0
"""Which steps replay CUDA graphs: vLLM's own lists of graphs, with more sizes. That they say the same, `tests/gpu` shows."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import transformers
from vllm.config import CompilationConfig, CUDAGraphMode
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

from vllm_fp8ext.compat.speed import piecewise_capture_sizes
from vllm_fp8ext.config import GRAPH_TOKENS

from .graph_manager import graph_manager as manager


@pytest.mark.parametrize(
    ("captured", "most", "expected"),
    [
        (512, 2048, [640, 768, 896, 1024, 1280, 1536, 1792, 2048]),
        (16, 300, [32, 64, 128, 160, 192, 224, 256, 300]),
        (272, 512, [320, 384, 448, 512]),
        (512, 512, []),
        (512, 0, []),
    ],
)
def test_sizes_beyond_those_that_are_captured(captured: int, most: int, expected: list[int]) -> None:
    assert piecewise_capture_sizes.sizes_beyond(captured, most) == expected


@pytest.mark.parametrize("captured", [1, 7, 8, 24, 129, 500])
def test_a_step_is_not_padded_by_more_than_a_quarter_where_that_costs(captured: int) -> None:
    sizes = [captured, *piecewise_capture_sizes.sizes_beyond(captured, 3000)]
    assert sizes[-1] == 3000
    for size, following in pairwise(sizes):
        assert size < following <= max(128, size * 1.25)


@pytest.mark.parametrize(
    ("arguments", "asked", "expected"),
    [
        ({}, None, GRAPH_TOKENS),
        ({}, 0, 0),
        ({"cudagraph_capture_sizes": [1, 2]}, None, 0),
        ({"max_cudagraph_capture_size": 64}, None, 0),
        ({"compilation_config": CompilationConfig(cudagraph_capture_sizes=[1])}, None, 0),
        ({"compilation_config": CompilationConfig(max_cudagraph_capture_size=64)}, None, 0),
        ({"cudagraph_capture_sizes": [1, 2]}, 1024, 1024),
        ({"cudagraph_capture_sizes": [1, 2]}, "auto", GRAPH_TOKENS),
    ],
)
def test_sizes_that_the_user_gives_are_all(
    arguments: dict[str, Any], asked: int | Literal["auto"] | None, expected: int
) -> None:
    config = SimpleNamespace(
        additional_config={"other": 1},
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(), is_moe=False),
        parallel_config=SimpleNamespace(data_parallel_size=1),
    )
    piecewise_capture_sizes.configure(config, EngineArgs(model="any", **arguments), asked)
    assert config.additional_config == {"other": 1, piecewise_capture_sizes.KEY: expected}


QWEN3 = {
    "0.6B": (1024, 16, 3072),
    "1.7B": (2048, 16, 6144),
    "4B": (2560, 32, 9728),
    "8B": (4096, 32, 12288),
    "32B": (5120, 64, 25600),
}
"""Hidden columns, query heads beside eight KV heads, columns of the MLP."""


def config(name: str, ranks: int = 1, **more: Any) -> Any:
    hidden, heads, wide = QWEN3[name]
    text = SimpleNamespace(
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=wide,
    )
    vars(text).update(more)
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=text, is_moe="num_experts_per_tok" in more),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks, data_parallel_size=1),
    )


EXPERTS = {"num_experts_per_tok": 8, "moe_intermediate_size": 768}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (config("0.6B"), 31744),
        (config("1.7B"), 9216),
        (config("4B"), 4096),
        (config("8B"), GRAPH_TOKENS),
        (config("8B", 2), 5120),
        (config("32B"), GRAPH_TOKENS),
        (config("32B", 4), 4096),
        (config("1.7B", num_attention_heads=32, **EXPERTS), 8192),
    ],
)
def test_small_layers_are_worth_more_graphs(given: Any, expected: int) -> None:
    assert piecewise_capture_sizes.worth_it(given) == expected
    assert _configured(given) == expected
    assert _configured(given, kv_cache_memory_bytes=1 << 30) == GRAPH_TOKENS
    assert _configured(given, num_gpu_blocks_override=100) == GRAPH_TOKENS


def test_graphs_that_are_not_measured_are_as_many_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS", "0")
    assert _configured(config("1.7B")) == GRAPH_TOKENS


def test_cores_that_step_together_have_vllms_graphs() -> None:
    """All of them would compute as many tokens as the busiest one."""
    mixture, dense = config("1.7B", **EXPERTS), config("1.7B")
    for engine in (mixture, dense):
        engine.parallel_config.data_parallel_size = 2
    assert _configured(mixture) == 0
    assert _configured(dense) == _configured(config("1.7B"))


def _configured(config: Any, **arguments: Any) -> Any:
    config.additional_config = None
    piecewise_capture_sizes.configure(config, EngineArgs(model="any", **arguments), None)
    return config.additional_config[piecewise_capture_sizes.KEY]


def test_weights_of_a_layer() -> None:
    """Of experts those that multiply one token; other names are not understood."""
    attention = 2048 * 128 * (16 + 8) * 2
    of = piecewise_capture_sizes.layer_weights
    assert of(config("8B", 4)) == 192_937_984 // 4
    assert of(config("1.7B", head_dim=None)) == of(config("1.7B"))
    assert of(config("1.7B", **EXPERTS)) == attention + 3 * 2048 * 8 * 768
    shared = config("1.7B", **EXPERTS, shared_expert_intermediate_size=512)
    assert of(shared) == attention + 3 * 2048 * (8 * 768 + 512)
    assert of(config("1.7B", **EXPERTS, n_shared_experts=2)) == attention + 3 * 2048 * 10 * 768
    assert of(config("1.7B", num_experts_per_tok=2)) is None
    unknown = config("1.7B")
    del unknown.model_config.hf_text_config.num_attention_heads
    assert of(unknown) is None
    assert piecewise_capture_sizes.worth_it(unknown) == GRAPH_TOKENS
    unknown.model_config.hf_text_config = transformers.Gemma4TextConfig()
    assert of(unknown) is None, "layers differ"
    assert of(config("1.7B", num_attention_heads=0, head_dim=None)) is None


@pytest.fixture(autouse=True)
def installed() -> Any:
    original = CudaGraphManager._init_candidates
    piecewise_capture_sizes.install()
    piecewise_capture_sizes.install()
    assert CudaGraphManager._init_candidates.__wrapped__ is original
    yield
    CudaGraphManager._init_candidates = original


def captured(cudagraphs: Any, mode: CUDAGraphMode) -> list[int]:
    return [description.num_tokens for description in reversed(cudagraphs._capture_descs.get(mode, []))]


def test_pieces_for_more_tokens() -> None:
    cudagraphs = manager()
    assert captured(cudagraphs, CUDAGraphMode.PIECEWISE) == [1, 64, 512, 640, 768, 896, 1000]
    assert captured(cudagraphs, CUDAGraphMode.FULL) == [1, 64, 512]
    (taken,) = cudagraphs._candidates[600, 0]
    assert (taken.cg_mode, taken.num_tokens) == (CUDAGraphMode.PIECEWISE, 640)
    assert (1001, 0) not in cudagraphs._candidates
    assert cudagraphs.compilation_config.cudagraph_capture_sizes == [1, 64, 512]


def test_a_captured_step_fits_into_its_requests() -> None:
    cudagraphs = manager(requests=2, longest=300, sizes=(1, 2, 4))
    assert captured(cudagraphs, CUDAGraphMode.PIECEWISE)[-1] == 600


@pytest.mark.parametrize(
    "unchanged",
    [
        {"tokens": 0},
        {"mode": CUDAGraphMode.FULL},
        {"mode": CUDAGraphMode.FULL_DECODE_ONLY},
        {"mode": CUDAGraphMode.NONE},
        {"sizes": ()},
        {"varlen": True},
        {"kind": CudaGraphManager},
    ],
)
def test_where_nothing_is_added(unchanged: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    seen = CudaGraphManager._init_candidates.__wrapped__

    def watched(self: Any) -> None:
        asked.extend(self.compilation_config.cudagraph_capture_sizes)
        seen(self)

    monkeypatch.setattr(CudaGraphManager, "_init_candidates", watched)
    piecewise_capture_sizes.install()
    manager(**unchanged)
    assert asked == list(unchanged.get("sizes", (1, 64, 512)))
