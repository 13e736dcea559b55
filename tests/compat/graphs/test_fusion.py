# SPDX-License-Identifier: Apache-2.0
"""The pass that joins linear layers with what comes before them, on graphs as vLLM hands them over."""

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch.fx.experimental.proxy_tensor import make_fx
from vllm.platforms import current_platform

from vllm_fp8ext.checkpoints import EARLY
from vllm_fp8ext.kernels.gemm.selection import GemmRoute
from vllm_fp8ext.kernels.numerics import reference
from vllm_fp8ext.kernels.testing import kernel_cases

pytest.importorskip("triton", reason="needs Triton, which the CPU build does not bring")

M, N, K = 5, 256, 384
EPSILON = 1e-6


@pytest.fixture(scope="module")
def joined() -> Callable[[fx.Graph], dict[str, int]]:
    """Runs the pass; returns how often each of our operators is in the graph afterwards."""
    import vllm.ir.ops  # noqa: F401  its operators

    from vllm_fp8ext.compat.graphs.fusion import JoinLinear

    def run(graph: fx.Graph) -> dict[str, int]:
        JoinLinear()(graph)
        graph.lint()
        collected: dict[str, int] = {}
        for node in graph.nodes:
            if node.op == "call_function" and str(node.target).startswith("fp8ext."):
                name = str(node.target).split(".")[1]
                collected[name] = collected.get(name, 0) + 1
        return collected

    return run


@pytest.fixture(scope="module")
def weight() -> tuple[Tensor, Tensor]:
    return reference.quantize_weight(kernel_cases.weight(N, K, "cpu"))


def linear(x: Tensor, weight: tuple[Tensor, Tensor]) -> Tensor:
    return torch.ops.fp8ext.linear(x, *weight, None, "fp32", 0, "slow")


@pytest.fixture(autouse=True)
def slow_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_fp8ext.kernels.gemm.registry import GEMM_KERNELS, GemmKernel

    def gemm(x: Any, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        return reference.gemm(*x, codes, scales).to(dtype)

    monkeypatch.setitem(GEMM_KERNELS, "slow", GemmKernel(name="slow", run=gemm))


def traced(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)


def integers(*shape: int, seed: int = 0) -> Tensor:
    """Sums of their squares are exact in any order."""
    noise = torch.Generator().manual_seed(seed)
    return torch.randint(-32, 33, shape, generator=noise).bfloat16()


def test_a_norm_with_residual(joined, weight):
    norm = torch.ones(K, dtype=torch.bfloat16) * 0.75

    def layer(x: Tensor, residual: Tensor, norm: Tensor, codes: Tensor, scales: Tensor) -> Any:
        normed, added = torch.ops.vllm_ir.fused_add_rms_norm(x, residual, norm, EPSILON, None)
        return linear(normed, (codes, scales)), added * 2

    inputs = integers(M, K), integers(M, K, seed=1), norm, *weight
    graph = traced(layer, *inputs)
    before = graph(*inputs)
    assert joined(graph.graph) == {"rmsnorm_linear": 1}
    graph.recompile()
    for actual, expected in zip(graph(*inputs), before, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_the_first_norm(joined, weight):
    norm = torch.ones(K, dtype=torch.bfloat16)

    def layer(x: Tensor, norm: Tensor, codes: Tensor, scales: Tensor) -> Any:
        return linear(torch.ops.vllm_ir.rms_norm(x, norm, EPSILON, None), (codes, scales)), x + 1

    inputs = integers(M, K), norm, *weight
    graph = traced(layer, *inputs)
    before = graph(*inputs)
    assert joined(graph.graph) == {"rmsnorm_linear": 1}
    graph.recompile()
    for actual, expected in zip(graph(*inputs), before, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("add", [False, True], ids=["alone", "with a residual"])
def test_a_norm_of_gemma(joined, weight, add: bool):
    """It multiplies by `1 + w` in fp32, which is not computed any more."""
    norm = torch.linspace(-1, 1, K).bfloat16()

    def layer(x: Tensor, residual: Tensor, norm: Tensor, codes: Tensor, scales: Tensor) -> Any:
        scaling = torch.ops.prims.convert_element_type(norm, torch.float32) + 1.0
        if not add:
            return linear(torch.ops.vllm_ir.rms_norm(x, scaling, EPSILON, None), (codes, scales))
        normed, added = torch.ops.vllm_ir.fused_add_rms_norm(x, residual, scaling, EPSILON, None)
        return linear(normed, (codes, scales)), added

    inputs = integers(M, K), integers(M, K, seed=1), norm, *weight
    graph = traced(layer, *inputs)
    before = graph(*inputs)
    assert joined(graph.graph) == {"rmsnorm_linear": 1}
    assert not any(node.target is torch.ops.aten.add.Tensor for node in graph.graph.nodes)
    graph.recompile()
    after = graph(*inputs)
    for actual, expected in zip(after, before, strict=True) if add else [(after, before)]:
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("why", ["another reads it", "no weight", "part of the row", "other dtype"])
def test_norms_that_stay(joined, weight, why: str):
    norm = torch.ones(K, dtype=torch.float32 if why == "other dtype" else torch.bfloat16)

    def layer(x: Tensor, norm: Tensor, codes: Tensor, scales: Tensor) -> Any:
        part = K // 2 if why == "part of the row" else None
        normed = torch.ops.vllm_ir.rms_norm(x, None if why == "no weight" else norm, EPSILON, part)
        out = linear(normed, (codes, scales))
        return (out, normed + 1) if why == "another reads it" else out

    graph = traced(layer, integers(M, K), norm, *weight)
    assert joined(graph.graph) == {"linear": 1}


@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"])
def test_a_gate(joined, weight, name: str):
    """As `SiluAndMul` and `GeluAndMul` are in a functional graph when their operators are enabled."""
    codes, scales = weight
    graph = fx.Graph()
    gate_up, held_codes, held_scales = (graph.placeholder(name) for name in ("gate_up", "codes", "scales"))
    empty = graph.call_function(torch.ops.aten.empty.memory_format, ([M, K],), {"dtype": torch.bfloat16})
    operation, result = _gate(name), "result" if name == "silu_and_mul" else "out"
    made = graph.call_function(auto_functionalized, (operation,), {result: empty, "input": gate_up})
    activated = graph.call_function(operator.getitem, (made, 1))
    arguments = (activated, held_codes, held_scales, None, "fp32", 0, "slow")
    graph.output(graph.call_function(torch.ops.fp8ext.linear.default, arguments))
    assert joined(graph) == {"gated_linear": 1}
    values = (integers(M, 2 * K) / 16).contiguous()
    actual = fx.GraphModule(torch.nn.Module(), graph)(values, codes, scales)
    gate, up = values.chunk(2, 1)
    functions = {
        "silu_and_mul": torch.nn.functional.silu,
        "gelu_and_mul": torch.nn.functional.gelu,
        "gelu_tanh_and_mul": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    }
    expected = linear(functions[name](gate) * up, weight)
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


def test_inductor_takes_the_joined_graph(weight):
    """With the layouts that it noted of the operator that was there before."""
    import vllm.ir.ops  # noqa: F401  its operators

    from vllm_fp8ext.compat.graphs.fusion import PASS, JoinLinear

    operation = _gate("silu_and_mul")

    options = {
        PASS: JoinLinear(),
        "fx_graph_cache": False,
        "enable_auto_functionalized_v2": False,
    }  # as vLLM's

    @torch.compile(fullgraph=True, dynamic=True, options=options)
    def layer(gate_up: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        activated = gate_up.new_empty(gate_up.shape[0], K)
        operation(activated, gate_up)
        return linear(activated, (codes, scales))

    values = (integers(M, 2 * K) / 16).contiguous()
    gate, up = values.chunk(2, 1)
    expected = linear(torch.nn.functional.silu(gate) * up, weight)
    torch.testing.assert_close(layer(values, *weight), expected, rtol=2e-2, atol=2e-2)


def _gate(name: str) -> Any:
    """vLLM's operator, or one of its name where vLLM is built without it."""
    current_platform.import_kernels()  # before: who comes second with a name is aborted
    if not hasattr(torch.ops._C, name):
        result = "result" if name == "silu_and_mul" else "out"
        torch.library.define(f"_C::{name}", f"(Tensor(a!) {result}, Tensor input) -> ()")
    return getattr(torch.ops._C, name).default


def test_the_pass_is_named_by_its_source():
    from vllm_fp8ext.compat.graphs.fusion import JoinLinear

    assert JoinLinear().uuid() == JoinLinear().uuid()
    assert len(JoinLinear().uuid()) == 64


def test_graphs_of_other_kernels_have_another_key():
    """A cached graph has the choice of kernels in it; copies of the configuration are what parts of a model compile with."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_fp8ext.compat.graphs import fusion
    from vllm_fp8ext.layers.linear import BlockFp8LinearMethod

    config = EngineArgs(model=str(EARLY), max_model_len=256).create_engine_config()
    config.additional_config = {"other": 1}

    def key(*routes: GemmRoute | None) -> str:
        layers = []
        for route in routes:
            layer = nn.Module()
            layer.weight = nn.Parameter(torch.empty(6144, 4096, device="meta"))
            layer.quant_method = object.__new__(BlockFp8LinearMethod)
            layer.quant_method.route = route
            layers.append(layer)
        part = nn.Module()
        part.vllm_config = copy.copy(config)
        fusion.name_kernels(config, nn.ModuleList([part, nn.Linear(1, 1), *layers]))
        assert config.additional_config["other"] == 1
        assert part.vllm_config.compute_hash() == config.compute_hash()
        return config.compute_hash()

    few, none = GemmRoute(32, "deep_gemm"), GemmRoute(0, "deep_gemm")
    assert key(few) == key(few, few)
    assert len({key(*routes) for routes in [(few,), (none,), (few, none), (None,), ()]}) == 5
