# SPDX-License-Identifier: Apache-2.0
"""The dtype of a tensor of torch or numpy. Imports neither: one of theirs can only be there when they are."""

import sys
from typing import Any


def dtype_name(name: str, tensor: Any) -> str:
    """torch's or numpy's name of the dtype, of a dense tensor with values.

    Raises:
        ValueError: anything else.
    """
    if instance_of(tensor, "torch", "Tensor"):
        if hasattr(tensor, "full_tensor"):
            raise ValueError(
                f"tensor {name}: expected a whole tensor, found a DTensor: send its full_tensor()"
            )
        if hasattr(tensor, "local_shards"):
            raise ValueError(
                f"tensor {name}: expected a whole tensor, found a ShardedTensor: take FSDP's full state dict"
            )
        if tensor.is_meta or str(tensor.layout) != "torch.strided":
            form = "one on the meta device" if tensor.is_meta else f"layout {tensor.layout}"
            raise ValueError(f"tensor {name}: expected a dense tensor with values, found {form}")
        return str(tensor.dtype).removeprefix("torch.")
    if instance_of(tensor, "numpy", "ndarray"):
        return str(tensor.dtype.name)
    raise ValueError(
        f"tensor {name}: expected a torch tensor or a numpy array, found {type(tensor).__name__}"
    )


def instance_of(value: object, module: str, kind: str) -> bool:
    """Tell whether `value` is of a class whose module may never have been imported."""
    known = getattr(sys.modules.get(module), kind, None)
    return known is not None and isinstance(value, known)
