# SPDX-License-Identifier: Apache-2.0
"""The sender of chunks over HTTP."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from vllm_fp8ext.serve import schema
from vllm_fp8ext.serve.client.everywhere import Everywhere
from vllm_fp8ext.serve.client.flow import Endpoint, Flow
from vllm_fp8ext.serve.client.source import ChunkSource, Manifests, Pushable, source_of
from vllm_fp8ext.serve.client.transports.http.chunks import send_chunks

if TYPE_CHECKING:
    from vllm_fp8ext.serve.client.options import PushOptions


@dataclass(frozen=True)
class HttpSender:
    """Sends a source as chunks, several at the same time."""

    source: ChunkSource
    options: "PushOptions"

    @classmethod
    def prepare(cls, weights: Pushable, options: "PushOptions", manifests: Manifests) -> Flow[Self]:
        """Make the source (`source_of`)."""
        return cls((yield from source_of(weights, manifests, fp8=options.fp8)), options)

    def send(
        self,
        updates: Mapping[Endpoint, schema.Update],
        everywhere: Everywhere,
        committed: Sequence[schema.Update] = (),
    ) -> Flow[None]:
        """Send every chunk (`send_chunks`)."""
        return send_chunks(updates, self.source, self.options, everywhere, committed)
