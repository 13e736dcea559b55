# SPDX-License-Identifier: Apache-2.0
"""Finds in a compiled graph which of a token's three positions turns which columns (MRoPE)."""

from operator import getitem
from typing import Any

import torch
from torch import fx

from vllm_fp8ext.compat.graphs.graph_nodes import calls, value
from vllm_fp8ext.kernels.attention.position_sections import PositionSections

FEATURE: str = "core"
WHY: str = "Read multimodal rotary embedding from graphs, whatever layer of vLLM made them."
GAIN: str = "see fusion_rope"
REPLACES: tuple[str, ...] = ()
USES: dict[str, tuple[str, ...]] = {}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "`fusion_rope` goes"

_aten, _prims = torch.ops.aten, torch.ops.prims
_MOST_COLUMNS = 128
"""Columns of half of the widest head."""
_CHOOSE = getitem, _aten.split_with_sizes.default, _aten.select.int, _aten.cat.default, _aten.where.self
"""Operators that make one row of the rows of a token's three positions."""
_OF_NUMBERS = _aten.remainder.Scalar, _aten.eq.Scalar, _aten.lt.Scalar, _aten.bitwise_and.Tensor
"""Operators that choose by a column's number."""


def chosen_columns(rows: fx.Node) -> tuple[fx.Node, PositionSections] | None:
    """Find the row that is made of three, `[3, M, columns]`: each of its columns is that of one position."""
    reached, size = [rows], value(rows).shape[-1]
    for node in reached:
        reached += [user for user in node.users if calls(user, *_CHOOSE) and user not in reached]
    made = max(reached)
    columns = _columns(made, rows)
    if columns is None or [column for _, column in columns] != list(range(size)):
        return None
    axes = [axis for axis, _ in columns]
    time, height, width = (axes.count(axis) for axis in range(3))
    for interleaved in (False, True):
        sections = PositionSections(time, height, width, interleaved)
        if sections.axes() == axes and height + width:
            return made, sections
    return None


def _columns(node: Any, rows: fx.Node) -> list[tuple[int, int]] | None:
    """List for each column of a node which row and column of `rows` it is.

    None if it is something else.
    """
    if calls(node, _aten.select.int):
        part, dimension, axis = node.args
        if dimension != 0:
            return None
        start, width = 0, value(node).shape[-1]
        if calls(part, getitem) and calls(part.args[0], _aten.split_with_sizes.default):
            part, (index, sizes) = part.args[0].args[0], (part.args[1], part.args[0].args[1])
            start = sum(sizes[:index])
        return [(axis, start + i) for i in range(width)] if part is rows else None
    if calls(node, _aten.cat.default):
        parts = [_columns(part, rows) for part in node.args[0]]
        if node.args[1:] not in ((-1,), (1,)) or None in parts:
            return None
        return [column for part in parts for column in part or ()]
    if calls(node, _aten.where.self):
        mask, (yes, no) = _constant(node.args[0]), (_columns(part, rows) for part in node.args[1:])
        if mask is None or yes is None or no is None or mask.shape != (len(yes),):
            return None
        return [a if chosen else b for chosen, a, b in zip(mask.tolist(), yes, no, strict=True)]
    return None


def _constant(node: Any) -> torch.Tensor | None:
    """Compute a tensor that is made of column numbers alone, or return None."""
    if calls(node, _prims.iota.default) and value(node).shape[0] <= _MOST_COLUMNS:
        return torch.arange(node.args[0]) * node.kwargs["step"] + node.kwargs["start"]
    if not calls(node, *_OF_NUMBERS) or node.kwargs:
        return None
    parts = [_constant(part) if isinstance(part, fx.Node) else part for part in node.args]
    if any(part is None for part in parts):
        return None
    result = node.target(*parts)
    assert isinstance(result, torch.Tensor)
    return result
