# SPDX-License-Identifier: Apache-2.0
"""Finds `torch.nn.GELU` in graphs as Inductor has them after its decompositions: a dozen operators in fp32.

The pattern is made by the same decompositions, so that it need not be written down here.
"""

import functools

import torch
from torch import fx
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

FEATURE: str = "fusion"
WHY: str = "Quantize GELU's outputs where they are made: Inductor has no pattern for it."
GAIN: str = "no engine measured"
REPLACES: tuple[str, ...] = ()
USES: dict[str, tuple[str, ...]] = {}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "Inductor has a pattern for it"
GPU_ONLY: bool = True

APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}
"""Names of torch's approximations, by those of `gelu_linear`."""


def gelu_of(node: fx.Node) -> tuple[fx.Node, str] | None:
    """Find what a node is the GELU of, and which; None if it is of nothing."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() != 2:
        return None
    if value.dtype not in (torch.bfloat16, torch.float16):
        return None
    for name in APPROXIMATE:
        x, pattern = _decomposed(name, value.dtype)
        inputs: dict[fx.Node, fx.Node] = {}
        if _alike(node, pattern, inputs) and getattr(inputs[x].meta.get("val"), "dtype", None) == value.dtype:
            return inputs[x], name
    return None


@functools.cache
def _decomposed(name: str, dtype: torch.dtype) -> tuple[fx.Node, fx.Node]:
    """Input and result."""

    def gelu(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x, approximate=APPROXIMATE[name])

    table = select_decomp_table()
    graph = make_fx(gelu, decomposition_table=table, tracing_mode="fake")(
        torch.empty(2, 2, dtype=dtype)
    ).graph
    first, *_, last = graph.nodes
    result = last.args[0]
    assert isinstance(result, fx.Node)
    return first, result


def _alike(node: object, pattern: object, inputs: dict[fx.Node, fx.Node]) -> bool:
    """Tell whether two expressions are the same but for their inputs, which are noted."""
    if not isinstance(pattern, fx.Node):
        return type(node) is type(pattern) and node == pattern
    if not isinstance(node, fx.Node):
        return False
    if pattern.op == "placeholder":
        return inputs.setdefault(pattern, node) is node
    if (node.op, node.target, node.kwargs) != (pattern.op, pattern.target, pattern.kwargs):
        return False
    return len(node.args) == len(pattern.args) and all(
        _alike(one, other, inputs) for one, other in zip(node.args, pattern.args, strict=True)
    )
