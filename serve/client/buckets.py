# SPDX-License-Identifier: Apache-2.0
"""Tensors side by side in buckets of bytes. Imports no torch at module level."""

import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from vllm_fp8ext.serve.client.dense import dense, size_with_scales
from vllm_fp8ext.serve.schema import DenseTensor
from vllm_fp8ext.serve.tensors import TensorLike
from vllm_fp8ext.weights.broadcast_source import MARK_BYTES
from vllm_fp8ext.weights.manifest import follows

ALIGNMENT = 16
"""Of each tensor in a bucket, in bytes."""


@dataclass
class Bucket:
    """Tensors of one device, what a server is told of them, and the mark behind them."""

    tensors: list[Any] = field(default_factory=list)
    listed: list[DenseTensor] = field(default_factory=list)
    end: int = 0
    """Where the last tensor ends."""
    mark: bytes = field(default_factory=lambda: secrets.token_bytes(MARK_BYTES))
    ready: Any = None
    """On a GPU, the event after which the tensors hold their values."""

    @property
    def bytes(self) -> int:
        return self.end + MARK_BYTES

    @property
    def next_offset(self) -> int:
        return -(-self.end // ALIGNMENT) * ALIGNMENT

    def add(self, name: str, tensor: Any) -> None:
        """Put a contiguous tensor behind the others."""
        self.listed.append(
            DenseTensor(
                name=name,
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=list(tensor.shape),
                offset=self.next_offset,
            )
        )
        self.end = self.next_offset + tensor.nbytes
        self.tensors.append(tensor)

    def computed(self) -> "Bucket":
        """This bucket, whose tensors have been computed when the current stream of this thread has come so far."""
        import torch

        device = self.tensors[0].device
        if device.type == "cuda":
            self.ready = torch.cuda.current_stream(device).record_event()
        return self

    def pack(self, room: Any) -> None:
        """Copy everything to its place in a tensor of `bytes` bytes; on a GPU on the current stream."""
        import torch

        for tensor, listed in zip(self.tensors, self.listed, strict=True):
            # not view: a dimension of size one may keep any stride and still count as contiguous
            raw = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
            room[listed.offset : listed.offset + raw.numel()].copy_(raw, non_blocking=True)
        room[-MARK_BYTES:].copy_(torch.frombuffer(bytearray(self.mark), dtype=torch.uint8))


def buckets(tensors: Iterable[tuple[str, TensorLike]], limit: int) -> Iterator[Bucket]:
    """The tensors in buckets of `limit` bytes at most, or of one tensor, with its block scales, all on the device of the
    first.

    Raises:
        ValueError: what is no dense torch tensor there.
    """
    bucket, device = Bucket(), None
    for name, tensor in tensors:
        held = dense(name, tensor, "cuda", "cpu")
        device = device or held.device
        if held.device != device:
            raise ValueError(f"tensor {name}: expected all tensors on {device}, found {held.device}")
        full = bucket.next_offset + size_with_scales(held, ALIGNMENT) + MARK_BYTES > limit
        if bucket.tensors and full and not follows(name, bucket.listed[-1].name):
            yield bucket.computed()
            bucket = Bucket()
        bucket.add(name, held)
    if bucket.tensors:
        yield bucket.computed()
