# SPDX-License-Identifier: Apache-2.0
"""Small graphs tell which position turns which column."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch._decomp import get_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

pytest.importorskip("vllm", reason="its passes stand beside vLLM's")
from vllm_fp8ext.compat.graphs.mrope_columns import chosen_columns
from vllm_fp8ext.kernels.attention.position_sections import PositionSections

COLUMNS = 12


def by_section(rows: Tensor, order: tuple[int, ...] = (0, 1, 2), axes: tuple[int, ...] = (0, 1, 2)) -> Tensor:
    parts = rows.split([6, 4, 2], dim=-1)
    return torch.cat([parts[part][axis] for part, axis in zip(order, axes, strict=True)], dim=-1)


def interleaved(rows: Tensor, *, height: int = 3, width: int = 2, shift: int = 0) -> Tensor:
    columns = torch.arange(COLUMNS) + shift if shift else torch.arange(COLUMNS)
    result = torch.where((columns % 3 == 1) & (columns < 3 * height), rows[1], rows[0])
    return torch.where((columns % 3 == 2) & (columns < 3 * width), rows[2], result)


def by_value(rows: Tensor) -> Tensor:
    return torch.where(rows[0] > 0, rows[1], rows[0])


def found(choose: Callable[[Tensor], Tensor]) -> tuple[PositionSections | None, bool]:
    """The sections, and that they are those of what the function returns."""
    arange = torch.ops.aten.arange
    table = get_decompositions([arange.default, arange.start, arange.start_step])
    graph = make_fx(lambda rows: choose(rows) * 2, table)(torch.randn(3, 5, COLUMNS)).graph
    graph.eliminate_dead_code()
    (rows,) = graph.find_nodes(op="placeholder")
    result = chosen_columns(rows)
    if result is None:
        return None, True
    (product,) = (node for node in graph.nodes if node.target is torch.ops.aten.mul.Tensor)
    return result[1], isinstance(result[0], fx.Node) and product.args[0] is result[0]


def test_sections_and_interleaved_columns() -> None:
    assert found(by_section) == (PositionSections(6, 4, 2, False), True)
    assert found(interleaved) == (PositionSections(7, 3, 2, True), True)


@pytest.mark.parametrize(
    "choose",
    [
        lambda rows: by_section(rows, order=(0, 2, 1)),
        lambda rows: by_section(rows, axes=(0, 2, 1)),
        lambda rows: by_section(rows, axes=(0, 0, 0)),
        lambda rows: interleaved(rows, shift=1),
        lambda rows: rows[0],
        lambda rows: rows[:, 0],
        by_value,
    ],
    ids=["columns", "positions", "one position", "other columns", "a row", "a token", "values"],
)
def test_what_is_something_else(choose: Callable[[Tensor], Tensor]) -> None:
    assert found(choose) == (None, True)
