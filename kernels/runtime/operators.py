# SPDX-License-Identifier: Apache-2.0
"""Makes a function an operator of torch, `fp8ext::NAME`, which compilers take as it is.

As `torch.library.custom_op`, without its wrappers: they take microseconds of each call, and a step without CUDA graphs makes
hundreds of calls. In return nothing checks that a result is a tensor of its own.
"""

from collections.abc import Callable
from typing import TypeVar, cast

import torch

_LIBRARY = torch.library.Library("fp8ext", "FRAGMENT")

Function = TypeVar("Function", bound=Callable[..., object])


def operator(fake: Callable[..., object]) -> Callable[[Function], Function]:
    """Register an operator under the function's name.

    The function changes none of its arguments and returns none of them. `fake` makes results of the right shapes and dtypes
    from arguments without values."""

    def register(function: Function) -> Function:
        name = function.__name__
        schema = torch.library.infer_schema(function, mutates_args=())
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"fp8ext::{name}", fake, lib=_LIBRARY)
        return cast("Function", getattr(torch.ops.fp8ext, name).default)

    return register
