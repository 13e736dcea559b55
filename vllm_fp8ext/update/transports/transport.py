# SPDX-License-Identifier: Apache-2.0
"""Types of a transport: each folder of `update/transports` fills them, the registry lists them."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias

from pydantic import BaseModel

from vllm_fp8ext.update.contract.safetensors_header import StoredTensor

if TYPE_CHECKING:
    from vllm_fp8ext.update.transports.receiver import Receiver


class Source:
    """The place of one chunk's bytes, for the ranks. A frozen dataclass of plain values; `transport` names its transport."""

    transport: ClassVar[str]

    def as_dict(self) -> dict[str, Any]:
        """Return the source as JSON values, with the name of its transport."""
        return {"transport": self.transport, **asdict(self)}  # type: ignore[call-overload]

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """Return the source of these fields, which have been JSON."""
        return cls(**fields)


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Limits of a server for a chunk that its ranks fetch themselves."""

    world_size: int
    """Ranks of the server."""
    chunk_bytes: int
    """Bytes of a chunk that a rank has to make room for, at most."""
    seconds: float
    """Longest time to wait for the sender."""


@dataclass(frozen=True, kw_only=True)
class Announcement:
    """A chunk that a client has told the server of: where it lies, and its tensors."""

    source: Source
    tensors: Sequence[StoredTensor]
    group: str | None = None
    """Id of the group of processes by which it comes, if it comes by one."""


Announce: TypeAlias = Callable[[Mapping[str, Any], ServerLimits], Announcement]
"""Turns the fields of a transport's body into an announcement; raises `UpdateError` for what can't be fetched."""


@dataclass(frozen=True, kw_only=True)
class Route:
    """`POST /updates/{id}/<path>`, by which a client announces a chunk."""

    path: str
    summary: str
    body: type[BaseModel]
    announce: Announce
    waits: bool = True
    """Answer when the chunk is staged; otherwise at once, and the update tells what became of it."""


@dataclass(frozen=True, kw_only=True)
class Transport:
    """A way by which tensors reach the ranks; its folder has the same name."""

    name: str
    summary: str
    source: type[Source]
    receiver: str
    """Its `Receiver`, as `module:class`: imported by ranks only, since it needs torch."""
    route: Route | None = None
    """How a client announces a chunk; None where its bytes come by a route of their own."""

    def load_receiver(self) -> "type[Receiver[Any]]":
        """Import the receiver."""
        module, _, name = self.receiver.partition(":")
        receiver: type[Receiver[Any]] = getattr(importlib.import_module(module), name)
        return receiver
