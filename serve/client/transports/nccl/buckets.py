# SPDX-License-Identifier: Apache-2.0
"""Tensors side by side in buckets of bytes. Imports no torch at module level."""

import secrets
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from vllm_fp8ext.serve.client.transports.dense import size_with_scales, torch_tensor
from vllm_fp8ext.serve.schema import DenseTensor
from vllm_fp8ext.serve.tensors import TensorLike
from vllm_fp8ext.update.contract.manifest import follows
from vllm_fp8ext.update.transports.nccl.message import MARK_BYTES

ALIGNMENT = 16
"""Alignment of each tensor in a bucket, in bytes."""


class PackingBuffer:
    """Bytes on a device that one bucket after the other is packed into. It grows to what the largest of them needs."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.data: Any = None

    def grown(self, needed: int, used: int, limit: int) -> Any:
        """At least `needed` bytes, the first `used` of them as they were; doubled at a time, up to `limit`."""
        import torch

        there = 0 if self.data is None else self.data.numel()
        if there < needed:
            size = max(needed, min(2 * there, limit))
            before, self.data = self.data, None
            data = torch.empty(size, dtype=torch.uint8, device=self.device)
            if used:
                data[:used].copy_(before[:used])
            self.data = data
        return self.data


class Bucket:
    """Tensors side by side in a room, their description, and the mark behind them."""

    def __init__(self, room: PackingBuffer, limit: int) -> None:
        self.device = room.device
        self.listed: list[DenseTensor] = []
        self.end = 0
        """End of the last tensor, in bytes."""
        self.mark = secrets.token_bytes(MARK_BYTES)
        self._room = room
        self._limit = limit
        self._packed: Any = None
        """On a GPU, the event after which the tensors lie there."""

    @property
    def bytes(self) -> int:
        return self.end + MARK_BYTES

    @property
    def next_offset(self) -> int:
        return -(-self.end // ALIGNMENT) * ALIGNMENT

    def add(self, name: str, tensor: Any) -> None:
        """Copy a tensor behind the others; on a GPU on the current stream."""
        start = self.next_offset
        end = start + tensor.nbytes
        data = self._room.grown(end + MARK_BYTES, self.end, self._limit)
        data[start:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.listed.append(DenseTensor(name=name, dtype=dtype, shape=list(tensor.shape), offset=start))
        self.end = end

    def packed(self) -> "Bucket":
        """Return this bucket, and note the event after which all of it lies there."""
        import torch

        if self.device.type == "cuda":
            self._packed = torch.cuda.current_stream(self.device).record_event()
        return self

    def data(self) -> Any:
        """Its bytes, with the mark behind them, once they lie there. On any thread."""
        import torch

        data = self._room.data[: self.bytes]
        mark = torch.frombuffer(bytearray(self.mark), dtype=torch.uint8)
        if self._packed is None:
            data[-MARK_BYTES:].copy_(mark)
            return data
        stream = torch.cuda.Stream(self.device)  # beside the one that the bucket before is broadcast on
        stream.wait_event(self._packed)
        with torch.cuda.stream(stream):
            data[-MARK_BYTES:].copy_(mark)
        stream.synchronize()
        return data


def buckets(
    tensors: Iterable[tuple[str, TensorLike]], limit: int, room: Callable[[int, Any], PackingBuffer]
) -> Iterator[Bucket]:
    """Yield the tensors in buckets of `limit` bytes at most. A larger tensor is a bucket by itself, with its block scales;
    all are on the device of the first. Each is copied to its place before the next one is asked for.

    `room`: that of bucket `n` on a device; nothing else may use it.

    Raises:
        ValueError: what is no dense torch tensor there.
    """
    bucket: Bucket | None = None
    count = 0
    for name, tensor in tensors:
        held = torch_tensor(name, tensor, "cuda", "cpu")
        if bucket is not None:
            if held.device != bucket.device:
                raise ValueError(
                    f"tensor {name}: expected all tensors on {bucket.device}, found {held.device}"
                )
            full = bucket.next_offset + size_with_scales(held, ALIGNMENT) + MARK_BYTES > limit
            if full and not follows(name, bucket.listed[-1].name):
                yield bucket.packed()
                count += 1
                bucket = Bucket(room(count, held.device), limit)
        else:
            bucket = Bucket(room(count, held.device), limit)
        bucket.add(name, held)
        del tensor, held  # nothing holds them while the next one is made
    if bucket is not None:
        yield bucket.packed()
