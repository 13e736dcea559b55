# SPDX-License-Identifier: Apache-2.0
"""Tensors that are sent from where they are. Imports no torch: a tensor of its can only be there when it is."""

import sys
from typing import Any

from vllm_fp8ext.kernels.numerics.layout import blocks
from vllm_fp8ext.serve.tensors import TensorLike
from vllm_fp8ext.update.contract.dtype_name import dtype_name
from vllm_fp8ext.update.contract.manifest import CODES_DTYPE

PLACES = {"cuda": "a GPU", "cpu": "the CPU"}


def has_codes(tensor: Any) -> bool:
    """Return whether it may be a weight in FP8, which block scales follow. No server takes other shapes as codes."""
    return str(tensor.dtype).endswith(CODES_DTYPE) and len(tensor.shape) == 2


def size_with_scales(tensor: Any, alignment: int = 1) -> int:
    """Return the bytes of a tensor with the block scales that follow codes. A server takes them in one chunk. Each begins at
    a multiple of `alignment`."""
    if not has_codes(tensor):
        return int(tensor.nbytes)
    rows, columns = tensor.shape
    return int(-(-tensor.nbytes // alignment) * alignment + blocks(rows) * blocks(columns) * 4)


def torch_tensor(name: str, tensor: TensorLike, *devices: str) -> Any:
    """A torch tensor on a device of these types, without its history of gradients; its elements lie as they do.

    Raises:
        ValueError: anything else.
    """
    torch = sys.modules.get("torch")
    any_tensor: Any = tensor
    if torch is None or not isinstance(any_tensor, torch.Tensor) or any_tensor.device.type not in devices:
        of_torch = torch is not None and isinstance(any_tensor, torch.Tensor)
        # numpy's arrays have a device, too
        where = any_tensor.device if of_torch else type(any_tensor).__name__
        expected = " or ".join(PLACES[device] for device in devices)
        raise ValueError(f"tensor {name}: expected a torch tensor on {expected}, found {where}")
    dtype_name(name, any_tensor)
    return any_tensor.detach()
