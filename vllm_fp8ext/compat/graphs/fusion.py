# SPDX-License-Identifier: Apache-2.0
"""Joins linear layers of compiled graphs with the norm or the activation function before them.

Activations are quantized where they are made; what stands between the projection to Q, K and V and attention is joined too
(`fusion_rope`). It is a post-grad pass, added under Inductor's own key in vLLM's compilation config.
"""

import inspect
import logging
import operator
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from vllm.compilation.passes.inductor_pass import InductorPass

from vllm_fp8ext.compat.graphs import graph_nodes, mrope_columns
from vllm_fp8ext.compat.graphs.compiled_configs import compiled_with
from vllm_fp8ext.compat.graphs.graph_nodes import alike, calls
from vllm_fp8ext.kernels.attention import position_sections, rotary
from vllm_fp8ext.kernels.gemm import linear

FEATURE: str = "fusion"
WHY: str = "Quantize activations where they are made: vLLM's fusions do not fire for a plugin's operators."
GAIN: str = "a layer's norm and quantization of 1 token 1.4 us instead of 3.6; no engine measured apart"
REPLACES: tuple[str, ...] = ()
USES: dict[str, tuple[str, ...]] = {
    "join linear layers with norms in compiled graphs": (
        "vllm.compilation.passes.inductor_pass:InductorPass.hash_source",
        "vllm.ir.ops.layernorm:rms_norm(x, weight, epsilon, variance_size)",
        "vllm.ir.ops.layernorm:fused_add_rms_norm(x, x_residual, weight, epsilon, variance_size)",
        "vllm.config.compilation:CompilationConfig.inductor_compile_config",
    ),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM's fusions take operators of a plugin"
GPU_ONLY: bool = True

logger = logging.getLogger("vllm.fp8ext")

PASS = "post_grad_custom_post_pass"
GATES = {"silu_and_mul": "silu", "gelu_and_mul": "gelu", "gelu_tanh_and_mul": "gelu_tanh"}
"""vLLM's operators, and what `gated_linear` calls them."""
CUSTOM_OPS = ("silu_and_mul", "gelu_and_mul")
"""vLLM's layers that call them."""
_SOURCES = (graph_nodes, linear, mrope_columns, position_sections, rotary)
"""Modules whose sources decide about graphs, too."""


def configure(config: Any, *, norm_rope: bool) -> None:
    """Add the pass to a `VllmConfig` before anything is compiled; a pass of the user's stays, without ours."""
    compilation = config.compilation_config
    if PASS in compilation.inductor_compile_config:
        logger.warning(
            "fp8ext: norms and activation functions are not fused with linear layers: %s is taken", PASS
        )
        return
    compilation.inductor_compile_config[PASS] = JoinLinear(norm_rope=norm_rope)
    # vLLM's cache of compiled graphs asks for the configuration alone; `name_kernels` adds to it
    config.additional_config = {**(config.additional_config or {}), "fp8ext_graphs": JoinLinear().uuid()}
    for name in CUSTOM_OPS:  # each as one node, so that it is found below
        if not any(op in compilation.custom_ops for op in (f"+{name}", f"-{name}", "all")):
            compilation.custom_ops.append(f"+{name}")


def name_kernels(config: Any, model: nn.Module) -> None:
    """Write into the configuration which kernel takes which layer of a loaded model.

    It is a constant of graphs: what is cached with other kernels is for other graphs.
    """
    from vllm_fp8ext.layers.linear import BlockFp8LinearMethod

    kernels = set()
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, BlockFp8LinearMethod):
            kernels.add(f"{list(module.weight.shape)} {method.route}")
    for each in compiled_with(config, model):
        each.additional_config = {**(each.additional_config or {}), "fp8ext_kernels": sorted(kernels)}


class JoinLinear(InductorPass):
    """Joins linear layers with what comes before them.

    `fp8ext::linear` of a norm becomes `fp8ext::rmsnorm_linear`, of a gated activation function `fp8ext::gated_linear`;
    norms of heads and their rotary embedding become `fp8ext::norm_rope`, if that is wanted.
    """

    def __init__(self, *, norm_rope: bool = True) -> None:
        self.norm_rope = norm_rope

    def __call__(self, graph: fx.Graph) -> None:
        joined = turned = 0
        if self.norm_rope:
            from vllm_fp8ext.compat.graphs import fusion_rope

            turned = fusion_rope.join_rope(graph)
        for node in list(graph.nodes):
            if node.op == "call_function" and node.target is torch.ops.fp8ext.linear.default:
                joined += _join_norm(graph, node) or _join_gate(graph, node)
        graph.eliminate_dead_code()
        logger.debug(
            "fp8ext: joined %d linear layers with what comes before them, %d attention layers' inputs",
            joined,
            turned,
        )

    def uuid(self) -> str:
        modules = [sys.modules[__name__], *_SOURCES]
        if self.norm_rope:
            from vllm_fp8ext.compat.graphs import fusion_rope

            modules.append(fusion_rope)
        return self.hash_source(*(inspect.getsource(module) for module in modules), str(self.norm_rope))


def _join_norm(graph: fx.Graph, node: fx.Node) -> bool:
    """Join a norm that this layer alone reads, over whole rows, with a plain weight."""
    source, ir = node.args[0], torch.ops.vllm_ir
    if not isinstance(source, fx.Node) or len(source.users) > 1:
        return False
    if source.target is ir.rms_norm.default:
        norm, residual = source, None
        x, weight, epsilon, *rest = norm.args
    elif source.target is operator.getitem and source.args[1] == 0:
        norm = source.args[0]
        if not isinstance(norm, fx.Node) or norm.target is not ir.fused_add_rms_norm.default:
            return False
        x, residual, weight, epsilon, *rest = norm.args
    else:
        return False
    if weight is None or any(part is not None for part in rest) or norm.kwargs:
        return False
    plain = _without_one(weight)
    weight = plain or weight
    if not alike(x, weight) or (residual is not None and not alike(x, residual)):
        return False
    with graph.inserting_before(node):
        joined = graph.call_function(
            torch.ops.fp8ext.rmsnorm_linear.default,
            (x, residual, weight, epsilon, *node.args[1:], plain is not None),
        )
        out = graph.call_function(operator.getitem, (joined, 0))
        added = graph.call_function(operator.getitem, (joined, 1))
    out.meta.update(node.meta)
    if residual is not None:
        for user in _items(norm, 1):
            added.meta.update(user.meta)
            user.replace_all_uses_with(added)
    node.replace_all_uses_with(out)
    return True


def _without_one(weight: Any) -> fx.Node | None:
    """Return `w` of a weight that is `w.float() + 1`, as Gemma's norms have it; None for others."""
    if not calls(weight, torch.ops.aten.add.Tensor) or weight.kwargs or weight.args[1] != 1:
        return None
    converted = weight.args[0]
    if not calls(converted, torch.ops.prims.convert_element_type.default, torch.ops.aten._to_copy.default):
        return None
    fp32 = getattr(converted.meta.get("val"), "dtype", None) == torch.float32
    return converted.args[0] if fp32 else None


def _join_gate(graph: fx.Graph, node: fx.Node) -> bool:
    source = node.args[0]
    if not isinstance(source, fx.Node) or len(source.users) > 1 or source.target is not operator.getitem:
        return False
    made, index = source.args
    if index != 1 or not isinstance(made, fx.Node) or made.target is not auto_functionalized:
        return False
    activation = _gates().get(made.args[0]) if made.args else None
    if activation is None:
        return False
    _replace(graph, node, torch.ops.fp8ext.gated_linear.default, made.kwargs["input"], activation)
    return True


def _replace(graph: fx.Graph, node: fx.Node, joined_operator: Any, x: Any, activation: str) -> None:
    """The layer by one that takes its activation function along."""
    with graph.inserting_before(node):
        joined = graph.call_function(joined_operator, (x, activation, *node.args[1:]))
    joined.meta.update(node.meta)
    joined.meta.pop("eager_input_vals", None)  # the other operator's
    node.replace_all_uses_with(joined)


def _gates() -> dict[Any, str]:
    """List those of `GATES` that this vLLM is built with."""
    return {
        getattr(torch.ops._C, name).default: activation
        for name, activation in GATES.items()
        if hasattr(torch.ops._C, name)
    }


def _items(node: fx.Node, index: int) -> Iterator[fx.Node]:
    yield from [user for user in node.users if user.target is operator.getitem and user.args[1] == index]
