# SPDX-License-Identifier: Apache-2.0
"""Parts of tensors that a process of a sharded trainer holds, as slices to send. Imports no torch at module level."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from vllm_fp8ext.serve.tensors import TensorLike
from vllm_fp8ext.update.contract.dtype_name import instance_of
from vllm_fp8ext.update.contract.tensor_slices import slice_name


def local_slices(
    tensors: Mapping[str, Any] | Iterable[tuple[str, Any]], *, first: bool = True
) -> Iterator[tuple[str, TensorLike]]:
    """Yield what this process has to send of tensors, by the names of slices: nothing is gathered.

    Of a `DTensor` (FSDP2, tensor parallel) that is the local shard, where this process is the first of those that hold it;
    what is smaller than a shard is there is sent whole. `first`: True in the one process that sends tensors which all of
    them have whole.

    Raises:
        ValueError: a `DTensor` that is a partial sum, or not one box of the tensor.
    """
    for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
        if not instance_of(tensor, "torch.distributed.tensor", "DTensor"):
            if first:
                yield name, tensor
            continue
        box = _local_box(name, tensor)
        if box is None:
            continue
        local = tensor.to_local()
        whole = all(extent == (0, size) for extent, size in zip(box, tensor.shape, strict=True))
        yield (name if whole else slice_name(name, box)), local


def _local_box(name: str, tensor: Any) -> tuple[tuple[int, int], ...] | None:
    """Return the box of a tensor that this process sends; None where that is nothing, or another process sends it."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = tensor.device_mesh, tensor.placements
    if any(type(placement) not in (Replicate, Shard) for placement in placements):
        kinds = ", ".join(map(str, placements))
        raise ValueError(f"tensor {name}: expected shards or replicas, found {kinds}")
    place = mesh.get_coordinate()
    if place is None:
        return None
    replicas = (at for at, placement in zip(place, placements, strict=True) if type(placement) is Replicate)
    if any(replicas):
        return None
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    if tuple(tensor.to_local().shape) != tuple(shape):
        local = list(tensor.to_local().shape)
        raise ValueError(f"tensor {name}: expected a local shard of {list(shape)}, found {local}")
    if not all(shape):
        return None
    return tuple((start, start + size) for start, size in zip(offset, shape, strict=True))
