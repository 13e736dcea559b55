# SPDX-License-Identifier: Apache-2.0
"""Tensors as parts of a few large buffers, as trainers with flat parameters hold them. A server opens a handle for each
allocation that tensors of its GPU lie in, and closes it again; a model's parameters by themselves are hundreds. Imports no
torch at module level."""

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from operator import itemgetter
from typing import Any, TypeVar

BUFFER_BYTES = 1 << 30
_MOVED = "_fp8ext_buffer"
"""Attribute of a parameter that was moved: the address of its buffer."""

Key = TypeVar("Key", bound=Hashable)


def flatten(model: Any, buffer_bytes: int = BUFFER_BYTES) -> None:
    """Move the parameters of a torch module into buffers of `buffer_bytes`, where they stay. Each stays on its device: its
    `Parameter`s are the same objects with the same values, contiguous now. Those that share all of their memory go on doing
    so. Buffers of the module, and other views of its parameters, are not followed.

    Once, before anything remembers their addresses (CUDA graphs, flat optimizers). One parameter after the other: on a GPU
    this takes two buffers beside the model.

    Raises:
        ValueError: a parameter that is no plain tensor (a `DTensor`, say), has no memory, overlaps with another one, or lies
            beside others in a buffer that is not of this function: an optimizer that holds it would go on changing that,
            and not the model. Nothing was moved.
    """
    import torch

    from vllm_fp8ext.update.transports.buffers import padded

    sharing: dict[tuple[Any, ...], list[Any]] = defaultdict(list)
    beside: dict[tuple[str, int], dict[tuple[Any, ...], str]] = defaultdict(dict)
    """Names of parameters, by memory and place in it, where it is not ours."""
    for name, parameter in model.named_parameters():
        data = parameter.data
        if type(data) is not torch.Tensor or data.layout is not torch.strided or data.is_meta:
            kind = f"{type(data).__name__} {data.layout} on {data.device}"
            raise ValueError(f"parameter {name}: expected a plain tensor, found {kind}")
        extent = sum((size - 1) * stride for size, stride in zip(data.shape, data.stride(), strict=True))
        first, last = data.data_ptr(), data.data_ptr() + data.element_size() * extent
        if data.numel():
            needed = data.element_size() * (data.storage_offset() + extent + 1)
            held = data.untyped_storage().nbytes()
            if held < needed:  # given back, as sharding and offloading do
                raise ValueError(f"parameter {name}: expected {needed} bytes of memory, found {held}")
            key = (str(data.device), first, last, data.dtype, data.shape, data.stride())
            sharing[key].append(parameter)
            memory = data.untyped_storage().data_ptr()
            if getattr(parameter, _MOVED, None) != memory:
                beside[str(data.device), memory].setdefault(key, name)
    placed = sorted(sharing, key=itemgetter(0, 1, 2))
    for here, there in itertools.pairwise(placed):
        if here[0] == there[0] and there[1] <= here[2]:
            raise ValueError(f"two parameters overlap in memory: {here[3:]} and {there[3:]}")
    for names in beside.values():
        if len(names) > 1:
            listed = ", ".join(sorted(names.values())[:3])
            raise ValueError(
                f"{len(names)} parameters ({listed}, …) lie in one buffer, which an optimizer may hold: such need no moving"
            )
    total = sum(padded(sharing[key][0].nbytes) for key in placed)
    pairs = ((key, sharing[key][0].data) for key in placed)  # each is let go of when it has moved
    used: set[int] = set()
    for key, flat in in_buffers(pairs, min(buffer_bytes, total)):
        for parameter in sharing[key]:
            parameter.data = flat
            setattr(parameter, _MOVED, flat.untyped_storage().data_ptr())
        if flat.is_cuda and (buffer := flat.untyped_storage().data_ptr()) not in used:
            used.add(buffer)
            torch.cuda.empty_cache()  # what parameters have left has no room for a buffer
    if used:
        torch.cuda.empty_cache()


def in_buffers(
    tensors: Iterable[tuple[Key, Any]], buffer_bytes: int = BUFFER_BYTES
) -> Iterator[tuple[Key, Any]]:
    """The same torch tensors, one by one, copied into buffers of `buffer_bytes` on their device; large ones that fit in no
    buffer's rest are by themselves."""
    from vllm_fp8ext.update.transports.buffers import Buffers

    buffers = Buffers(buffer_bytes)
    for key, tensor in tensors:
        yield key, buffers.empty(tensor.shape, tensor.dtype, tensor.device).copy_(tensor)
