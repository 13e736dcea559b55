# SPDX-License-Identifier: Apache-2.0
"""The sender of handles."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Self

from vllm_fp8ext.serve import schema
from vllm_fp8ext.serve.client import calls
from vllm_fp8ext.serve.client.everywhere import Everywhere
from vllm_fp8ext.serve.client.flow import Endpoint, Flow, work
from vllm_fp8ext.serve.client.progress import Counter, Progress
from vllm_fp8ext.serve.client.resumed import require_no_others
from vllm_fp8ext.serve.client.source import Manifests, Pushable, Tensors, tensors_of
from vllm_fp8ext.serve.client.transports.ipc.handles import batches, handles

if TYPE_CHECKING:
    from vllm_fp8ext.serve.client.options import PushOptions

IPC_CHUNK_BYTES = 4 << 30
"""Bytes of a chunk when tensors are made one by one. So many of them, or of copies of them, are there at once. Those of a
`dict` are all there, and go as one chunk."""


@dataclass(frozen=True)
class IpcSender:
    """Hands tensors over in chunks of `limit` bytes, one after the other."""

    tensors: Tensors
    limit: float
    progress: Progress | None

    @classmethod
    def prepare(cls, weights: Pushable, options: "PushOptions", manifests: Manifests) -> Flow[Self]:
        """Take the tensors (`tensors_of`)."""
        tensors = yield from tensors_of(weights, manifests, fp8=options.fp8)
        limit = math.inf if tensors.complete else IPC_CHUNK_BYTES
        return cls(tensors, options.chunk_bytes or limit, options.progress)

    def send(
        self,
        updates: Mapping[Endpoint, schema.Update],
        everywhere: Everywhere,
        committed: Sequence[schema.Update] = (),
    ) -> Flow[None]:
        """Send the handles of one chunk after the other; a chunk's tensors may change once it is staged."""
        if not updates:
            return
        counter, count = Counter(self.progress, None), 0
        for group in batches(self.tensors.pairs, self.limit, self.tensors.lent):
            body = yield from work(partial(handles, group, count))

            def send(endpoint: Endpoint, body: schema.Handles = body) -> Flow[schema.Update]:
                return calls.handles(endpoint, updates[endpoint].id, body)

            yield from everywhere(list(updates), send)
            counter.end_chunk(count, sum(tensor.nbytes for _, tensor in group))
            group.clear()  # else they are there until the next group is complete
            count += 1
        require_no_others(updates.values(), count)
