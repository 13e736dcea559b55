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

Key = TypeVar("Key", bound=Hashable)


def flatten(model: Any, buffer_bytes: int = BUFFER_BYTES) -> None:
    """Move the parameters of a torch module, each on its device, into buffers of `buffer_bytes`, where they stay: its
    `Parameter`s are the same objects with the same values, contiguous now. Parameters that share memory go on doing so.

    Once, before anything remembers their addresses (CUDA graphs, flat optimizers). One parameter after the other: beside the
    model this takes one buffer.

    Raises:
        ValueError: a parameter that is no plain tensor (a `DTensor`, say), or that overlaps with another one; nothing was moved.
    """
    import torch

    sharing: dict[tuple[Any, ...], list[Any]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        data = parameter.data
        if type(data) is not torch.Tensor or data.layout is not torch.strided:
            raise ValueError(
                f"parameter {name}: expected a plain tensor, found {type(data).__name__} {data.layout}"
            )
        first = data.data_ptr()
        last = first + data.element_size() * sum(
            (size - 1) * stride for size, stride in zip(data.shape, data.stride(), strict=True)
        )
        key = (str(data.device), first, last, data.dtype, data.shape, data.stride())
        sharing[key if data.numel() else (name,)].append(parameter)
    placed = sorted((key for key in sharing if len(key) > 1), key=itemgetter(0, 1, 2))
    for here, there in itertools.pairwise(placed):
        if here[0] == there[0] and there[1] <= here[2]:
            raise ValueError(f"two parameters overlap in memory: {here[3:]} and {there[3:]}")
    for key, flat in in_buffers(((key, sharing[key][0].data) for key in placed), buffer_bytes):
        for parameter in sharing[key]:
            parameter.data = flat


def in_buffers(
    tensors: Iterable[tuple[Key, Any]], buffer_bytes: int = BUFFER_BYTES
) -> Iterator[tuple[Key, Any]]:
    """The same torch tensors, one by one, copied into buffers of `buffer_bytes` on their device; a larger one has a buffer of
    its own."""
    from vllm_fp8ext.weights.buffers import Buffers

    buffers = Buffers(buffer_bytes)
    for key, tensor in tensors:
        yield key, buffers.empty(tensor.shape, tensor.dtype, tensor.device).copy_(tensor)
