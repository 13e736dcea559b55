# SPDX-License-Identifier: Apache-2.0
"""Has attention quantize its outputs for the linear layer behind it.

It does so in graphs as Dynamo makes them.

Later vLLM splits graphs at attention, and no pass sees both.
"""

import inspect
import logging
import operator
import sys
from typing import Any

import torch
from torch import Tensor, fx
from vllm.compilation.backends import VllmBackend
from vllm.compilation.passes.inductor_pass import InductorPass

from vllm_fp8ext.compat.graphs import graph_nodes
from vllm_fp8ext.compat.graphs.graph_nodes import calls
from vllm_fp8ext.compat.wrapping import wrap
from vllm_fp8ext.kernels.numerics.reference import ScaleFormat

FEATURE: str = "quantized_attention"
WHY: str = (
    "Have attention quantize its outputs: vLLM's own pass needs graphs that are not split, "
    "and its quantization."
)
GAIN: str = "0.7 to 1.3 % more tokens/s with 8 to 128 requests (Qwen3-8B, FP8 KV cache, H200)"
REPLACES: tuple[str, ...] = ("vllm.compilation.backends:VllmBackend.__call__(graph, example_inputs)",)
USES: dict[str, tuple[str, ...]] = {
    "have attention quantize its outputs": (
        "vllm.model_executor.layers.attention.attention:unified_attention_with_output("
        "output, output_block_scale, kv_cache_dummy_dep)",
    ),
}
UPSTREAM: str = "https://github.com/vllm-project/vllm/pull/45151"
REMOVE_WHEN: str = "vLLM's pass does without whole graphs, and takes operators of a plugin"
NEEDS: tuple[str, ...] = ("decode_attention",)
SWITCH: tuple[str, object] = ("kernels.quantized_attention", False)
GPU_ONLY: bool = True

logger = logging.getLogger("vllm.fp8ext")

_KEY = "fp8ext_attention"
"""Key of the additional configuration, which vLLM's cache of compiled graphs asks for."""


def configure(config: Any, form: ScaleFormat | None) -> None:
    """Join in graphs that are compiled with this `VllmConfig`, or in none, as at first.

    All of its attention layers take room for quantized outputs with scales of this format.
    """
    rest = {name: value for name, value in (config.additional_config or {}).items() if name != _KEY}
    source = InductorPass.hash_source(
        *(inspect.getsource(module) for module in (sys.modules[__name__], graph_nodes))
    )
    config.additional_config = rest if form is None else {**rest, _KEY: {"scale_format": form, "by": source}}
    wrap(VllmBackend, "__call__", _wrap_call)


def _wrap_call(call: Any) -> Any:
    def joined(self: Any, graph: fx.GraphModule, example_inputs: Any) -> Any:
        options = (self.vllm_config.additional_config or {}).get(_KEY)
        joined_layers = join_attention(graph, options["scale_format"]) if options else 0
        if joined_layers:
            logger.info(
                "blockfp8: %d attention layers quantize their outputs for the layers behind them",
                joined_layers,
            )
        return call(self, graph, example_inputs)

    return joined


def join_attention(module: fx.GraphModule, form: str) -> int:
    """Have attention write codes and scales, and the layer behind it read them.

    It is done where nothing but a linear layer that quantizes to this format reads what attention writes. Returns
    how often.
    """
    joined = 0
    for node in list(module.graph.nodes):
        if _runs(node, torch.ops.vllm.unified_attention_with_output):
            joined += _join(module.graph, node, form)
    if joined:
        module.recompile()
    return joined


def _join(graph: fx.Graph, attention: fx.Node, form: str) -> bool:
    query, key, value, heads, *name = attention.args
    if len(name) != 1 or attention.kwargs.keys() - {"kv_cache_dummy_dep"}:
        return False
    if not isinstance(heads, fx.Node) or not _views(heads, heads.args[0]):
        return False
    empty, flat = heads.args[0], _only(heads, attention)
    if not calls(empty, torch.empty) or _only(empty) is not heads or not query < heads:
        return False
    layer = _only(flat) if _views(flat, heads) else None
    if layer is None or not _runs(layer, torch.ops.fp8ext.linear) or layer.args[0] is not flat:
        return False
    _, codes_NK, scales_NbKb, bias_N, layer_form, decode_tokens, gemm = layer.args
    written = _example(heads)
    if layer_form != form or written.dtype != torch.bfloat16 or written.dim() != 3:
        return False
    columns = int(written.shape[1] * written.shape[2])
    if _example(codes_NK).shape[1] != columns:  # zeros lie behind them
        return False
    with graph.inserting_before(heads):  # ahead of what vLLM splits graphs at, which caches K and V too
        room = _call(graph, torch.ops.fp8ext.quantized_room.default, query, columns)
        codes, scales = (_call(graph, operator.getitem, room, part) for part in (0, 1))
        outputs = _call(graph, torch.ops.aten.view.default, codes, [-1, *map(int, written.shape[1:])])
    with graph.inserting_before(attention):
        joined = graph.call_function(
            attention.target,
            (query, key, value, outputs, *name),
            {**attention.kwargs, "output_block_scale": scales},
        )
    joined.meta.update(attention.meta)
    with graph.inserting_before(layer):
        whole = _call(graph, torch.ops.aten.view.default, outputs, [-1, columns])
        arguments = (whole, scales, codes_NK, scales_NbKb, bias_N, decode_tokens, gemm)
        out = graph.call_function(torch.ops.fp8ext.quantized_linear.default, arguments)
    out.meta.update(layer.meta)
    layer.replace_all_uses_with(out)
    # nothing else goes: in these graphs a statement without readers may have effects
    for node in (layer, flat, attention, heads, empty):
        graph.erase_node(node)
    return True


def _call(graph: fx.Graph, target: Any, *arguments: Any) -> fx.Node:
    """A node with what it makes as an example, as Dynamo gives it to each."""
    node = graph.call_function(target, arguments)
    examples = [part.meta["example_value"] if isinstance(part, fx.Node) else part for part in arguments]
    node.meta["example_value"] = target(*examples)
    return node


def _example(node: fx.Node) -> Tensor:
    example = node.meta["example_value"]
    assert isinstance(example, Tensor)
    return example


def _runs(node: fx.Node, operation: Any) -> bool:
    """Dynamo names an operator or its overload, as the model does."""
    return calls(node, operation, operation.default)


def _views(node: fx.Node | None, of: fx.Node) -> bool:
    return node is not None and node.op == "call_method" and node.target == "view" and node.args[0] is of


def _only(node: fx.Node | None, but: fx.Node | None = None) -> fx.Node | None:
    """The one reader of a node, beside another."""
    users = [user for user in node.users if user is not but] if isinstance(node, fx.Node) else []
    return users[0] if len(users) == 1 else None
