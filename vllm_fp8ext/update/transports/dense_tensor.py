# SPDX-License-Identifier: Apache-2.0
"""Dense tensors in memory, as a client describes them: their elements one after the other."""

import math
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract.fields import Body, Name, Size
from vllm_fp8ext.update.contract.manifest import CODES_DTYPE, TensorSpec
from vllm_fp8ext.update.contract.safetensors_header import StoredTensor

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, CODES_DTYPE: 1}


class DenseTensor(Body):
    """A dense tensor somewhere in memory."""

    name: Name
    dtype: Annotated[str, Field(max_length=32)] = Field(description="torch's name, such as `bfloat16`.")
    shape: Annotated[list[Size], Field(max_length=64)]
    offset: Size = Field(description="Bytes from the begin of the memory that it lies in.")


def dense_tensor(name: str, dtype: str, shape: Sequence[int], offset: int) -> StoredTensor:
    """Return the tensor from byte `offset` of some memory on.

    Raises:
        UpdateError: `wrong-dtype`: no dtype that an update may have.
    """
    if dtype not in ITEM_BYTES:
        message = f"tensor {name}: expected dtype {', '.join(ITEM_BYTES)}, found {dtype}"
        problems = [{"kind": "wrong-dtype", "tensor": name, "expected": list(ITEM_BYTES), "found": dtype}]
        raise UpdateError("wrong-dtype", message, status=422, problems=problems)
    size = math.prod(shape) * ITEM_BYTES[dtype]
    return StoredTensor(TensorSpec(name, tuple(shape), dtype), offset, size)


def lies_within(tensor: StoredTensor, memory_bytes: int) -> bool:
    """Tell whether the first `memory_bytes` bytes of the memory hold the tensor, aligned."""
    return tensor.start + tensor.size <= memory_bytes and tensor.start % ITEM_BYTES[tensor.spec.dtype] == 0
