# SPDX-License-Identifier: Apache-2.0
"""What a client says of tensors that it holds on a GPU."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.weights.manifest import CODES_DTYPE, TensorSpec
from vllm_fp8ext.weights.safetensors_header import StoredTensor

HANDLE_BYTES = 64
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, CODES_DTYPE: 1}


@dataclass(frozen=True)
class IpcSource:
    """`device`: UUID of the GPU. `allocations`: handle (base64) and bytes of each; tensors' starts count through all of them,
    one after the other."""

    device: str
    allocations: tuple[tuple[str, int], ...]


def ipc_tensor(source: IpcSource, described: Mapping[str, Any]) -> StoredTensor:
    """One tensor (`name`, `dtype`, `shape`, `allocation`, `offset`) of a source.

    Raises:
        UpdateError: `bad-handle`: it lies outside its allocation. `wrong-dtype`: no dtype that an update may have.
    """
    name, dtype, number, offset = (described[key] for key in ("name", "dtype", "allocation", "offset"))
    if dtype not in ITEM_BYTES:
        message = f"tensor {name}: expected dtype {', '.join(ITEM_BYTES)}, found {dtype}"
        problems = [{"kind": "wrong-dtype", "tensor": name, "expected": list(ITEM_BYTES), "found": dtype}]
        raise UpdateError("wrong-dtype", message, status=422, problems=problems)
    size = math.prod(described["shape"]) * ITEM_BYTES[dtype]
    room = source.allocations[number][1] if number < len(source.allocations) else -1
    if offset + size > room or offset % ITEM_BYTES[dtype]:
        message = f"tensor {name}: {size} bytes from {offset} on do not lie in allocation {number} of {max(room, 0)} bytes"
        raise UpdateError("bad-handle", message, status=422)
    start = sum(size for _, size in source.allocations[:number]) + offset
    return StoredTensor(TensorSpec(name, tuple(described["shape"]), dtype), start, size)
