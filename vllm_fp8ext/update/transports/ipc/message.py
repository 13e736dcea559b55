# SPDX-License-Identifier: Apache-2.0
"""The message that tells ranks of tensors that a client holds on a GPU."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, ClassVar, Self

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract.safetensors_header import StoredTensor
from vllm_fp8ext.update.transports.dense_tensor import dense_tensor, lies_within
from vllm_fp8ext.update.transports.transport import Announcement, ServerLimits, Source

HANDLE_BYTES = 64


@dataclass(frozen=True)
class IpcSource(Source):
    """Allocations on one GPU. Tensors' starts count through all of them, one after the other."""

    device: str
    """UUID of the GPU."""
    allocations: tuple[tuple[str, int], ...]
    """Handle (base64) and bytes of each."""

    transport: ClassVar[str] = "ipc"

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """Return the source of these fields, of which JSON has made tuples lists."""
        return cls(fields["device"], tuple((handle, size) for handle, size in fields["allocations"]))

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """Begin of each allocation, and the end of the last."""
        return tuple(accumulate((size for _, size in self.allocations), initial=0))


def ipc_tensor(
    source: IpcSource, *, name: str, dtype: str, shape: Sequence[int], allocation: int, offset: int
) -> StoredTensor:
    """Return one tensor of a source, from byte `offset` of an allocation on.

    Raises:
        UpdateError: `bad-handle`: it lies outside its allocation. `wrong-dtype`: no dtype that an update may have.
    """
    tensor = dense_tensor(name, dtype, shape, offset)
    memory_bytes = source.allocations[allocation][1] if allocation < len(source.allocations) else -1
    if not lies_within(tensor, memory_bytes):
        where = f"allocation {allocation} of {max(memory_bytes, 0)} bytes"
        message = f"tensor {name}: {tensor.size} bytes from {offset} on do not lie in {where}"
        raise UpdateError("bad-handle", message, status=422)
    return StoredTensor(tensor.spec, source.bounds[allocation] + offset, tensor.size)


def announce(body: Mapping[str, Any], limits: ServerLimits) -> Announcement:
    """Describe the chunk of a body (fields of `Handles`).

    Raises:
        UpdateError: as `ipc_tensor`.
    """
    allocations = tuple((allocation["handle"], allocation["bytes"]) for allocation in body["allocations"])
    source = IpcSource(body["device"], allocations)
    return Announcement(source=source, tensors=[ipc_tensor(source, **tensor) for tensor in body["tensors"]])
