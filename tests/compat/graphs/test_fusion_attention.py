# SPDX-License-Identifier: Apache-2.0
"""Attention and the linear layer behind it in graphs of Dynamo. Attention itself is a stand-in: vLLM's on CPUs quantizes
nothing."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from vllm.compilation.backends import split_graph
from vllm.config import CompilationConfig
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.model_executor.layers.attention import attention as _operators  # noqa: F401  vLLM's

from vllm_fp8ext.compat.graphs.fusion_attention import configure, join_attention
from vllm_fp8ext.kernels.gemm import linear
from vllm_fp8ext.kernels.gemm.registry import GemmKernel
from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.testing import kernel_cases

HEADS, SIZE, N = 2, 128, 40
COLUMNS = HEADS * SIZE
WEIGHT = reference.quantize_weight(kernel_cases.weight(N, COLUMNS, "cpu"))
WIDER = WEIGHT[0].view(torch.uint8).where(torch.arange(COLUMNS) < 192, 0).view(WEIGHT[0].dtype), WEIGHT[1]
BIAS = torch.arange(float(N)).bfloat16()


def attend(_layer: Any, query: Tensor, key: Tensor, *_: Any, output: Tensor, **more: Any) -> None:
    """Queries and keys added up."""
    result, scales = query + key, more["output_block_scale"]
    if scales is None:
        output.copy_(result)
    else:
        codes, its = reference.quantize_activation(result.flatten(1))
        output.copy_(codes.view(output.shape))
        scales.copy_(its)


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> Any:
    def gemm(x: Any, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        return reference.gemm(*x, codes, scales).to(dtype)

    monkeypatch.setitem(linear.GEMM_KERNELS, "slow", GemmKernel(name="slow", run=gemm))
    own = SimpleNamespace(forward=attend, do_kv_cache_update=lambda *_: None)
    layer = SimpleNamespace(impl=own, kv_cache=torch.empty(0))
    context = ForwardContext(
        no_compile_layers={"layer": layer}, attn_metadata={"layer": None}, slot_mapping={"layer": None}
    )
    with override_forward_context(context):
        yield


def attention(query: Tensor, key: Tensor, size: int = SIZE) -> Tensor:
    """As vLLM's layer."""
    columns = query.shape[1]
    output = torch.empty((query.shape[0], columns), dtype=torch.bfloat16)
    query = query.view(-1, columns // size, size)
    heads = output.view(-1, columns // size, size)
    key = key.view(-1, columns // size, size)
    cached = torch.ops.vllm.unified_kv_cache_update(key, key, "layer")
    torch.ops.vllm.unified_attention_with_output(query, key, key, heads, "layer", kv_cache_dummy_dep=cached)
    return heads.view(-1, columns)


def multiplied(x: Tensor, form: str = "fp32") -> Tensor:
    out: Tensor = torch.ops.fp8ext.linear(x, *WEIGHT, BIAS, form, 0, "slow")
    return out


def plain(query: Tensor, key: Tensor) -> Tensor:
    return multiplied(attention(query, key))


def read_twice(query: Tensor, key: Tensor) -> Tensor:
    x = attention(query, key)
    return multiplied(x) + x.sum()


def read_otherwise(query: Tensor, key: Tensor) -> Tensor:
    return multiplied(attention(query, key) * 2)


def other_scales(query: Tensor, key: Tensor) -> Tensor:
    return multiplied(attention(query, key), "pow2")


def wider_weight(query: Tensor, key: Tensor) -> Tensor:
    """Zeros lie behind the 192 columns of its codes."""
    x = attention(query[:, :192].contiguous(), key[:, :192].contiguous(), 64)
    out: Tensor = torch.ops.fp8ext.linear(x, *WIDER, BIAS, "fp32", 0, "slow")
    return out


def joined(layer: Callable[[Tensor, Tensor], Tensor], *given: Tensor) -> tuple[Tensor, int, fx.GraphModule]:
    """What a layer makes when its graph was changed, at how many places, and the graph."""
    seen: list[tuple[int, fx.GraphModule]] = []

    def backend(module: fx.GraphModule, _inputs: Any) -> Any:
        seen.append((join_attention(module, "fp32"), module))
        module.graph.lint()
        return module.forward

    torch._dynamo.reset()
    out = torch.compile(layer, backend=backend, dynamic=True, fullgraph=True)(*given)
    ((count, module),) = seen
    return out, count, module


def inputs(tokens: int) -> tuple[Tensor, Tensor]:
    query, key = (kernel_cases.activations(tokens, COLUMNS, "cpu", seed) for seed in (1, 2))
    return query, key


@pytest.mark.parametrize("tokens", [2, 5, 8])
def test_attention_writes_what_the_layer_behind_it_multiplies(tokens: int) -> None:
    pytest.importorskip("triton", reason="needs Triton, which the CPU build does not bring")
    given = inputs(tokens)
    out, count, module = joined(plain, *given)
    assert count == 1
    assert "fp8ext.linear" not in str(module.graph)
    assert torch.equal(out, plain(*given))


def test_a_graph_is_split_into_as_many_pieces_as_before() -> None:
    pytest.importorskip("triton", reason="needs Triton, which the CPU build does not bring")
    pieces: list[int] = []
    splits = [*CompilationConfig._attention_ops, "vllm::unified_kv_cache_update"]  # as vLLM does by default

    def backend(module: fx.GraphModule, _inputs: Any) -> Any:
        for _ in range(2):
            pieces.append(len(split_graph(copy.deepcopy(module), splits)[1]))
            join_attention(module, "fp32")
        return module.forward

    torch._dynamo.reset()
    torch.compile(plain, backend=backend, dynamic=True, fullgraph=True)(*inputs(5))
    assert pieces[0] == pieces[1]


def test_statements_without_readers_stay() -> None:
    """They may change what others read."""
    pytest.importorskip("triton", reason="needs Triton, which the CPU build does not bring")

    def clamped(query: Tensor, key: Tensor) -> Tensor:
        query = query + 0
        query.clamp_(-1, 1)
        return plain(query, key)

    given = inputs(5)
    out, count, _ = joined(clamped, *given)
    assert count == 1
    assert torch.equal(out, clamped(*given))


@pytest.mark.parametrize("layer", [read_twice, read_otherwise, other_scales, wider_weight])
def test_what_is_read_otherwise_stays(layer: Callable[[Tensor, Tensor], Tensor]) -> None:
    pytest.importorskip("triton", reason="needs Triton, which the CPU build does not bring")
    given = inputs(3)
    out, count, _ = joined(layer, *given)
    assert count == 0
    assert torch.equal(out, layer(*given))


def test_it_is_asked_for_by_what_graphs_are_kept_by() -> None:
    config = SimpleNamespace(additional_config={"fp8ext": {}})
    configure(config, "pow2")
    assert config.additional_config["fp8ext_attention"]["scale_format"] == "pow2"
    configure(config, None)
    assert config.additional_config == {"fp8ext": {}}
