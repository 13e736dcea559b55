# SPDX-License-Identifier: Apache-2.0
"""The message that tells ranks of a broadcast: who takes part, and where tensors lie in the bucket."""

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.kernels.runtime.nccl import ID_BYTES
from vllm_fp8ext.update.contract.safetensors_header import StoredTensor
from vllm_fp8ext.update.transports.dense_tensor import dense_tensor, lies_within
from vllm_fp8ext.update.transports.transport import Announcement, ServerLimits, Source

MARK_BYTES = 8
"""Random bytes at the end of every bucket: they prove that it is the announced one."""

_STORE = re.compile(r"[A-Za-z0-9._:\[\]-]+:[0-9]{1,5}/[A-Za-z0-9]{1,64}")


@dataclass(frozen=True)
class BroadcastSource(Source):
    """A bucket of bytes that rank 0 of a group of `size` processes broadcasts.

    `bytes`: how many, the mark included. `mark`: in hexadecimal. `id`: by which they find each other: for NCCL a unique id in
    base64; for Gloo `host:port/name`, a TCP store that rank 0 runs and a prefix of its keys. `first_rank`: the group's rank
    of the server's rank 0. `seconds`: longest time to wait, for the others and for the bytes.
    """

    backend: str
    id: str
    size: int
    first_rank: int
    bytes: int
    mark: str
    seconds: float

    transport: ClassVar[str] = "nccl"


def announce(body: Mapping[str, Any], limits: ServerLimits) -> Announcement:
    """Describe the bucket of a body (fields of `Receive`).

    Raises:
        UpdateError: `chunk-too-large`, or as `check_group` and `broadcast_tensor`.
    """
    limit = limits.chunk_bytes
    if body["bytes"] > limit:
        message = f"a bucket may have {limit} bytes, found {body['bytes']}"
        raise UpdateError("chunk-too-large", message, status=413, limit=limit)
    source = BroadcastSource(**body["group"], bytes=body["bytes"], mark=body["mark"], seconds=limits.seconds)
    check_group(source, limits.world_size)
    tensors = [broadcast_tensor(source, **tensor) for tensor in body["tensors"]]
    return Announcement(source=source, tensors=tensors, group=source.id)


def check_group(source: BroadcastSource, world_size: int) -> None:
    """Require that a server of so many ranks can take part.

    Raises:
        UpdateError: `invalid-request`.
    """
    last = source.first_rank + world_size - 1
    if last >= source.size:
        raise _invalid(
            f"a group of {source.size} has no ranks {source.first_rank} to {last} for a server of {world_size}"
        )
    if source.backend == "nccl":
        nccl_id(source.id)
    elif not _STORE.fullmatch(source.id):
        raise _invalid(f"group id: expected host:port/name, found {source.id!r}")


def nccl_id(text: str) -> bytes:
    """Return the unique id that `text` is the base64 of."""
    try:
        id = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        id = b""
    if len(id) != ID_BYTES:
        raise _invalid(f"group id: expected {ID_BYTES} bytes in base64, found {text!r}")
    return id


def broadcast_tensor(
    source: BroadcastSource, *, name: str, dtype: str, shape: Sequence[int], offset: int
) -> StoredTensor:
    """Return one tensor of the bucket, from its byte `offset` on.

    Raises:
        UpdateError: `invalid-request`: it lies outside the bucket. `wrong-dtype`: no dtype that an update may have.
    """
    tensor = dense_tensor(name, dtype, shape, offset)
    memory_bytes = source.bytes - MARK_BYTES
    if not lies_within(tensor, memory_bytes):
        raise _invalid(
            f"tensor {name}: {tensor.size} bytes from {offset} on do not lie in {memory_bytes} bytes before the mark"
        )
    return tensor


def _invalid(message: str) -> UpdateError:
    return UpdateError("invalid-request", message, status=422)
