# SPDX-License-Identifier: Apache-2.0
"""Puts a function of ours around one of vLLM's."""

import functools
from collections.abc import Callable
from typing import Any

_MARK = "fp8ext_original"


def wrap(owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
    """Replace `owner.name` by what `wrapper` makes of it, once."""
    original = getattr(owner, name)
    if not hasattr(original, _MARK):
        wrapped = functools.wraps(original)(wrapper(original))
        setattr(wrapped, _MARK, original)
        setattr(owner, name, wrapped)
