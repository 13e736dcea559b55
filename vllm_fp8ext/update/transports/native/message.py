# SPDX-License-Identifier: Apache-2.0
"""Broadcasts of vLLM's weight transfer, as a rank is told of them. Needs no torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, ClassVar, Self

from vllm_fp8ext.update.contract.manifest import TensorSpec
from vllm_fp8ext.update.contract.native_info import ITEM_BYTES, NcclInit, spec_bytes
from vllm_fp8ext.update.contract.safetensors_header import StoredTensor
from vllm_fp8ext.update.transports.transport import Source

_ALIGNED = 16
"""Bytes that starts of moved tensors are multiples of."""


@dataclass(frozen=True, kw_only=True)
class NativeSource(Source):
    """Broadcasts that rank 0 of a group sends to all others, one after the other.

    `native`: serial number of the group, which a trainer's `init_weight_transfer_engine` makes; 0 leaves the group.
    `backend`: `nccl` or `gloo`. The group's `size - 1` receivers find rank 0 by `host` and `port` of its TCP store, or by
    `unique_id`, an `ncclUniqueId` in base64. `first_rank`: the group's rank of the server's rank 0. `parts`: bytes of each
    broadcast; they lie side by side in a buffer of `bytes` bytes. `moves`: `(from, to, bytes)` of tensors whose place in
    that buffer is not aligned to their elements. `seconds`: longest wait for the others, and for each broadcast.
    """

    native: int
    backend: str
    host: str | None
    port: int | None
    unique_id: str | None
    size: int
    first_rank: int
    parts: tuple[int, ...]
    moves: tuple[tuple[int, int, int], ...]
    bytes: int
    seconds: float

    transport: ClassVar[str] = "native"

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """Return the source of these fields, of which JSON has made tuples lists."""
        moves = tuple((place, to, size) for place, to, size in fields["moves"])
        return cls(**{**fields, "parts": tuple(fields["parts"]), "moves": moves})


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Some broadcasts that are received and staged together."""

    source: NativeSource
    tensors: list[StoredTensor]


def native_source(
    init: NcclInit, native: int, backend: str, seconds: float, parts: Sequence[int] = ()
) -> NativeSource:
    """Return the source of these broadcasts; without any, all that its ranks do is join the group."""
    return NativeSource(
        native=native,
        backend=backend,
        host=init.master_address,
        port=init.master_port,
        unique_id=init.nccl_unique_id_b64,
        size=init.world_size,
        first_rank=init.rank_offset,
        parts=tuple(parts),
        moves=(),
        bytes=sum(parts),
        seconds=seconds,
    )


def broadcasts(sizes: Sequence[int], bucket_bytes: int | None) -> Iterator[range]:
    """Yield which tensors of `sizes` bytes each broadcast brings: one, or a bucket.

    A bucket ends with the tensor that takes it beyond `bucket_bytes`, as vLLM's `pack_tensors` ends it.
    """
    first = total = 0
    for number, size in enumerate(sizes):
        total += size
        if bucket_bytes is None or total > bucket_bytes:
            yield range(first, number + 1)
            first, total = number + 1, 0
    if first < len(sizes):
        yield range(first, len(sizes))


def batches(
    specs: Sequence[TensorSpec], sizes: Sequence[int], bucket_bytes: int | None, most_bytes: int
) -> Iterator[tuple[list[int], list[TensorSpec]]]:
    """Yield broadcasts that are received together: bytes of each, and the tensors of all.

    Buckets come one by one, and tensors that come by themselves up to `most_bytes` together.
    """
    parts: list[int] = []
    tensors: list[TensorSpec] = []
    for which in broadcasts(sizes, bucket_bytes):
        part = sum(sizes[number] for number in which)
        if parts and (bucket_bytes is not None or sum(parts) + part > most_bytes):
            yield parts, tensors
            parts, tensors = [], []
        parts.append(part)
        tensors += [specs[number] for number in which]
    if parts:
        yield parts, tensors


def placed(source: NativeSource, specs: Sequence[TensorSpec]) -> Batch:
    """Give each tensor its place in the buffer: where it comes, or behind all, aligned to its elements."""
    sizes = [spec_bytes(spec) for spec in specs]
    starts = [0, *accumulate(sizes)][: len(sizes)]
    end, moves, tensors = source.bytes, [], []
    for spec, start, size in zip(specs, starts, sizes, strict=True):
        at = start
        if start % ITEM_BYTES[spec.dtype]:
            at = -(-end // _ALIGNED) * _ALIGNED
            moves.append((start, at, size))
            end = at + size
        tensors.append(StoredTensor(spec, at, size))
    return Batch(source=replace(source, moves=tuple(moves), bytes=end), tensors=tensors)
