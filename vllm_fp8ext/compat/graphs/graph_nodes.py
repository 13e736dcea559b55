# SPDX-License-Identifier: Apache-2.0
"""Says what a node of a compiled graph is."""

from typing import Any

import torch
from torch import fx

FEATURE: str = "core"
WHY: str = "Read compiled graphs in one way."
GAIN: str = "see fusion"
REPLACES: tuple[str, ...] = ()
USES: dict[str, tuple[str, ...]] = {}
UPSTREAM: str = "none known"
REMOVE_WHEN: str = "`fusion` goes"


def calls(node: Any, *targets: Any) -> bool:
    """Tell whether a node is a call of one of these."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def value(node: Any) -> torch.Tensor:
    """The fake tensor that it makes."""
    tensor = node.meta["val"]
    assert isinstance(tensor, torch.Tensor)
    return tensor


def alike(*nodes: Any) -> bool:
    """Tell whether all are known, and make tensors of one dtype."""
    values = [getattr(node, "meta", {}).get("val") for node in nodes]
    dtypes = {tensor.dtype for tensor in values if isinstance(tensor, torch.Tensor)}
    return None not in values and len(dtypes) == 1
