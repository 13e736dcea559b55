# SPDX-License-Identifier: Apache-2.0
"""Puts functions of ours around one of vLLM's."""

import functools
from collections.abc import Callable
from typing import Any

_WRAPPERS = "fp8ext_wrappers"
"""What is kept with a function of ours: the names of all that are around vLLM's."""


def wrap(owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
    """Replace `owner.name` by what `wrapper` makes of it, once; others may be around it already."""
    inner = getattr(owner, name)
    told = f"{wrapper.__module__}.{wrapper.__qualname__}"
    around: frozenset[str] = getattr(inner, _WRAPPERS, frozenset())
    if told not in around:
        wrapped = functools.wraps(inner)(wrapper(inner))
        setattr(wrapped, _WRAPPERS, around | {told})
        setattr(owner, name, wrapped)
