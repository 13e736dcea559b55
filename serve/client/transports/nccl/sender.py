# SPDX-License-Identifier: Apache-2.0
"""The sender of broadcasts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from vllm_fp8ext.serve import schema
from vllm_fp8ext.serve.client.everywhere import Everywhere
from vllm_fp8ext.serve.client.flow import Endpoint, Flow
from vllm_fp8ext.serve.client.source import Manifests, Pushable, Tensors, tensors_of
from vllm_fp8ext.serve.client.transports.nccl.broadcast import broadcast

if TYPE_CHECKING:
    from vllm_fp8ext.serve.client.options import PushOptions

BUCKET_BYTES = 1 << 30
"""Bytes of a bucket, unless a server takes less. Two of them are held here, one in each rank."""


@dataclass(frozen=True)
class BroadcastSender:
    """Broadcasts tensors in buckets."""

    tensors: Tensors
    options: "PushOptions"

    @classmethod
    def prepare(cls, weights: Pushable, options: "PushOptions", manifests: Manifests) -> Flow[Self]:
        """Take the tensors (`tensors_of`)."""
        return cls((yield from tensors_of(weights, manifests, fp8=options.fp8)), options)

    def send(
        self,
        updates: Mapping[Endpoint, schema.Update],
        everywhere: Everywhere,
        committed: Sequence[schema.Update] = (),
    ) -> Flow[None]:
        """Broadcast every bucket (`broadcast`)."""
        options = self.options
        limit = options.chunk_bytes or BUCKET_BYTES
        return broadcast(
            updates, self.tensors.pairs, limit, options.group, options.progress, everywhere, committed
        )
