# SPDX-License-Identifier: Apache-2.0
"""The client's side of a transport."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from vllm_fp8ext.serve import schema
from vllm_fp8ext.serve.client.everywhere import Everywhere
from vllm_fp8ext.serve.client.flow import Endpoint, Flow
from vllm_fp8ext.serve.client.source import Manifests, Pushable

if TYPE_CHECKING:
    from vllm_fp8ext.serve.client.options import PushOptions


class Sender(Protocol):
    """Weights of one push, checked as far as possible before an update is opened."""

    def send(
        self,
        updates: Mapping[Endpoint, schema.Update],
        everywhere: Everywhere,
        committed: Sequence[schema.Update] = (),
    ) -> Flow[None]:
        """Send the weights to the servers of open updates, until all are staged.

        `committed`: the same update on servers that serve it already. What is known to differ from it is refused.

        Raises:
            ValueError: a tensor that can't be sent.
            UpdateError: a refusal, as `everywhere` tells it.
        """


Prepare: TypeAlias = Callable[[Pushable, "PushOptions", Manifests], Flow[Sender]]
"""Makes the sender of a push; raises `ValueError` for weights that can't be sent."""


@dataclass(frozen=True, kw_only=True)
class ClientTransport:
    """A way by which a client sends tensors; its folder has the same name."""

    name: str
    prepare: Prepare
    several_servers: bool = True
    """True where the same tensors can be sent to several servers."""
    sends_tensors: bool = True
    """False where the server finds them by a path; nothing is quantized here then."""
    has_checksums: bool = False
    """True where the server checks a SHA-256 of each chunk."""
