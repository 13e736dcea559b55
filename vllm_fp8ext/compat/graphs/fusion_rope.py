# SPDX-License-Identifier: Apache-2.0
"""Joins norms of heads, their rotary embedding and the quantization of queries.

`fp8ext::norm_rope` takes their place.
"""

from collections.abc import Callable
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import fx

from vllm_fp8ext.compat.graphs.graph_nodes import alike, calls, value
from vllm_fp8ext.compat.graphs.mrope_columns import chosen_columns
from vllm_fp8ext.kernels.attention.position_sections import PositionSections
from vllm_fp8ext.kernels.numerics.reference import FP8_DTYPE

FEATURE: str = "norm_rope"
WHY: str = (
    "Prepare Q and K by one launch: vLLM's own pass needs its rotary operator, and neither "
    "starts early nor quantizes."
)
GAIN: str = "2.4 % more tokens/s with 8 requests, 0.8 % with 32 (Qwen3-8B, FP8 KV cache, H200)"
REPLACES: tuple[str, ...] = ()
USES: dict[str, tuple[str, ...]] = {
    "join norms of heads with rotary embedding": (
        "vllm.ir.ops.layernorm:rms_norm(x, weight, epsilon, variance_size)",
    ),
}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "vLLM's pass starts before the kernel ahead has ended, and quantizes"
NEEDS: tuple[str, ...] = ("fusion",)
SWITCH: tuple[str, object] = ("kernels.norm_rope", False)
GPU_ONLY: bool = True

_aten, _prims = torch.ops.aten, torch.ops.prims
_SIZES = (64, 128, 256)
_DTYPES = (torch.bfloat16, torch.float16)
_LARGEST = torch.finfo(FP8_DTYPE).max
_SPREAD = _aten.unsqueeze.default, _aten.expand.default, _aten.clone.default, _aten.reshape.default
"""Operators that repeat the scales of KV heads for every column."""


class _Heads(NamedTuple):
    """Heads of Q or of K, turned."""

    out: fx.Node
    split: fx.Node
    """The split of the projection's columns."""
    part: int
    """The index of its part."""
    weight: Any
    """The weight of their norm, or None."""
    epsilon: float


class _Table(NamedTuple):
    cos_sin: fx.Node
    positions: fx.Node
    cos: fx.Node
    sin: fx.Node
    sections: PositionSections | None = None
    """Columns that each position turns, where a token has three."""


def join_rope(graph: fx.Graph) -> int:
    """How many attention layers' inputs were joined."""
    joined = 0
    for node in list(graph.nodes):
        if calls(node, _aten.index.Tensor) and (table := _table(node)):
            turned = [heads for user in _users(table.cos) if (heads := _heads(user, table))]
            pairs = [
                (q, k) for q in turned for k in turned if q.split is k.split and (q.part, k.part) == (0, 1)
            ]
            joined += len(pairs) == 1 and _join(graph, table, *pairs[0])
    return joined


def _join(graph: fx.Graph, table: _Table, query: _Heads, key: _Heads) -> bool:
    heads, kv_heads = value(query.out).shape[1], value(key.out).shape[1]
    size = value(table.cos_sin).shape[1]
    projected, columns, *dimension = query.split.args
    normed = (query.weight is None, query.epsilon) == (key.weight is None, key.epsilon)
    if not normed or heads % kv_heads or size not in _SIZES or dimension not in ([-1], [1]):
        return False
    if columns != [heads * size, kv_heads * size, kv_heads * size] or value(projected).dim() != 2:
        return False
    weights = [weight for weight in (query.weight, key.weight) if weight is not None]
    if any(value(weight).shape != (size,) for weight in weights):
        return False
    if not alike(projected, table.cos_sin, *weights) or value(projected).dtype not in _DTYPES:
        return False
    quantized, scale = _quantized(query.out, kv_heads) or (None, None)
    first = min(query.out, key.out)
    with graph.inserting_before(first):
        arguments: tuple[Any, ...] = (projected, table.positions, table.cos_sin, query.weight, key.weight)
        arguments += (query.epsilon, scale, heads, kv_heads)
        if table.sections is not None:
            *sections, interleaved = table.sections
            arguments += (sections, interleaved)
        joined = graph.call_function(torch.ops.fp8ext.norm_rope.default, arguments)
        parts = [graph.call_function(getitem, (joined, i)) for i in (0, 1)]
        if quantized is not None:
            parts[0] = graph.call_function(_aten.reshape.default, (parts[0], [-1, heads * size]))
    for part, old in zip(parts, (quantized or query.out, key.out), strict=True):
        part.meta.update(old.meta)
        part.meta.pop("eager_input_vals", None)  # another operator's
        old.replace_all_uses_with(part)
    return True


def _table(index: fx.Node) -> _Table | None:
    """Find rows of a table for the tokens' positions, as cosines and sines.

    Positions come from outside the graph: one a token, or three.
    """
    cos_sin, chosen = index.args
    if len(chosen) != 1 or len(value(cos_sin).shape) != 2:
        return None
    positions = chosen[0]
    if not _given(cos_sin) or not isinstance(positions, fx.Node) or positions.op != "placeholder":
        return None
    places, halves = value(positions), _halves(index)
    if halves is None or places.stride()[-1] != 1 or places.dim() not in (1, 2):
        return None
    if places.dim() == 1:
        return _Table(cos_sin, positions, *halves)
    if places.shape[0] != 3:
        return None
    cos, sin = (chosen_columns(half) for half in halves)
    if cos is None or sin is None or cos[1] != sin[1]:
        return None
    return _Table(cos_sin, positions, cos[0], sin[0], cos[1])


def _heads(cat: fx.Node, table: _Table) -> _Heads | None:
    """Find heads `[M, heads, D]` that are turned: `cat((low * cos - high * sin, high * cos + low * sin))`."""
    if not calls(cat, _aten.cat.default) or cat.args[1:] not in ((-1,), (2,)) or len(cat.args[0]) != 2:
        return None
    first, second = cat.args[0]
    if not calls(first, _aten.sub.Tensor) or not calls(second, _aten.add.Tensor):
        return None
    if first.kwargs or second.kwargs:  # a factor of what is added
        return None
    low, high = _factor(first.args[0], table.cos), _factor(first.args[1], table.sin)
    sums = [(_factor(a, table.cos), _factor(b, table.sin)) for a, b in (second.args, second.args[::-1])]
    if low is None or high is None or (high, low) not in sums:
        return None
    if not (calls(low, getitem) and calls(high, getitem) and low.args[0] is high.args[0]):
        return None
    if not calls(low.args[0], _aten.split.Tensor):
        return None
    source = low.args[0].args[0]
    if _halves(source) != (low, high) or len(value(source).shape) != 3:
        return None
    weight, epsilon = None, 0.0
    if calls(source, torch.ops.vllm_ir.rms_norm.default):
        source, weight, epsilon, *rest = source.args
        if not _given(weight) or any(part is not None for part in rest):
            return None
        if value(source).shape[-1] != value(low).shape[-1] * 2:  # normed by head
            return None
    while calls(source, _aten.reshape.default):
        source = source.args[0]
    if not calls(source, getitem) or not calls(source.args[0], _aten.split_with_sizes.default):
        return None
    return _Heads(cat, source.args[0], source.args[1], weight, epsilon)


def _quantized(out: fx.Node, kv_heads: int) -> tuple[fx.Node, fx.Node] | None:
    """The codes of turned queries, `QuantFP8` with a given scale, and that scale: one, or one for each KV head. None if
    anything else reads the queries."""
    node, (heads, size) = out, value(out).shape[1:]
    flat = heads * size
    steps: tuple[tuple[Any, Callable[[fx.Node], bool]], ...] = (
        (_aten.reshape.default, lambda node: value(node).dim() == 2 and value(node).shape[1] == flat),
        (_prims.convert_element_type.default, lambda node: node.args[1] == torch.float32),
        (_aten.mul.Tensor, lambda node: calls(node.args[1], _aten.reciprocal.default)),
        (_aten.clamp_min.default, lambda node: node.args[1] == -_LARGEST),
        (_aten.clamp_max.default, lambda node: node.args[1] == _LARGEST),
        (_prims.convert_element_type.default, lambda node: node.args[1] == FP8_DTYPE),
    )
    scale: Any = None
    for target, fits in steps:
        users = list(node.users)
        if len(users) != 1 or not calls(users[0], target) or users[0].args[0] is not node:
            return None
        node = users[0]
        if not fits(node):
            return None
        if target is _aten.mul.Tensor:
            scale = node.args[1].args[0]
    by_head = False
    while calls(scale, *_SPREAD):
        spread, scale = scale, scale.args[0]
        if calls(spread, _aten.expand.default):
            by_head = (tuple(value(scale).shape), tuple(value(spread).shape)) == (
                (1, kv_heads, 1),
                (1, kv_heads, heads // kv_heads * size),
            )
    if not _given(scale) or value(scale).dtype != torch.float32:
        return None
    count = value(scale).numel()
    return (node, scale) if count == 1 or (count == kv_heads and by_head) else None


def _halves(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Find both halves of the last dimension, if nothing else of a node is read."""
    if len(node.users) != 1:
        return None
    (split,), size = node.users, value(node).shape[-1]
    last = value(node).dim() - 1
    if not calls(split, _aten.split.Tensor):
        return None
    if split.args[1] * 2 != size or split.args[2:] not in ((-1,), (last,)):
        return None
    parts: dict[Any, fx.Node] = {user.args[1]: user for user in split.users if calls(user, getitem)}
    return (parts[0], parts[1]) if parts.keys() == {0, 1} and len(split.users) == 2 else None


def _factor(product: Any, row: fx.Node) -> fx.Node | None:
    """Find what is multiplied by a token's row, the same for all heads."""
    if not calls(product, _aten.mul.Tensor):
        return None
    for factor, other in (product.args, product.args[::-1]):
        if calls(other, _aten.unsqueeze.default) and other.args[0] is row and other.args[1] in (-2, 1):
            return factor if isinstance(factor, fx.Node) else None
    return None


def _users(cos: fx.Node) -> list[fx.Node]:
    """Find tensors that are put together of what a row of cosines multiplies."""
    nodes: dict[fx.Node, None] = {cos: None}
    for _ in ("unsqueeze", "mul", "sub or add", "cat"):
        nodes = dict.fromkeys(user for node in nodes for user in node.users)
    return list(nodes)


def _given(node: Any) -> bool:
    """Tell whether a node comes from outside the graph.

    So it is there before everything in it, and lies there as kernels read it.
    """
    return isinstance(node, fx.Node) and node.op == "placeholder" and value(node).is_contiguous()
