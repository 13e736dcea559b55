# SPDX-License-Identifier: Apache-2.0
"""The group of processes that a trainer broadcasts through. Imports no torch at module level."""

import base64
import contextlib
import secrets
import socket
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self
from urllib.parse import urlsplit

from vllm_fp8ext.kernels.runtime import nccl
from vllm_fp8ext.kernels.runtime.nccl import NcclError
from vllm_fp8ext.serve.client.transports.nccl.buckets import PackingBuffer
from vllm_fp8ext.serve.schema import BroadcastGroup

if TYPE_CHECKING:
    from vllm_fp8ext.update.transports.nccl.group import GroupMember


class Group:
    """Joins a trainer's process with the ranks of servers, for pushes with `transport="nccl"`: between GPUs through NCCL,
    between CPUs through Gloo.

    It is made by the first push, which takes seconds, and serves the next ones to the same servers from tensors on the same
    device. It is made anew for others, after a push that failed, after a server's restart, and after a push to one of them
    through another group: a rank is in one at a time. Of several threads, one may push through it at a time.

    `seconds`: longest time to wait for the servers, and for each bucket. `host`: address under which servers reach this
    machine, for Gloo; by default that from which it reaches the first server. (NCCL has `NCCL_SOCKET_IFNAME`.)
    """

    def __init__(self, *, seconds: float = 60.0, host: str | None = None) -> None:
        self.seconds = seconds
        self._host = host
        self._members: tuple[Any, ...] = ()
        self._joined: GroupMember | None = None
        self._places: dict[str, BroadcastGroup] = {}
        self._store: Any = None
        self._rooms: list[PackingBuffer] = []

    def close(self) -> None:
        """Leave, and free the buffers. Servers leave when they are told of another group. It may be used again."""
        joined, self._joined = self._joined, None
        self._members, self._places, self._store, self._rooms = (), {}, None, []
        if joined is not None:
            joined.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def confirm(self, last_groups: Iterable[str | None]) -> None:
        """Leave, unless each server names this group last (`last_groups`)."""
        known = {place.id for place in self._places.values()}
        if not known.issuperset(last_groups):
            self.close()

    def meet(self, ranks: Mapping[str, int], device: Any) -> dict[str, BroadcastGroup]:
        """Return each server's place in the group, by URL. `ranks`: its number of ranks. It is to be told before `joined`;
        the group is a new one if this is not the one of these servers and this device."""
        members = (device, *ranks.items())
        if members != self._members:
            self.close()
            backend: Literal["nccl", "gloo"] = "nccl" if device.type == "cuda" else "gloo"
            id = self._nccl_id() if backend == "nccl" else self._store_id(next(iter(ranks)))
            first, size = 1, 1 + sum(ranks.values())
            for url, count in ranks.items():
                self._places[url] = BroadcastGroup(backend=backend, id=id, size=size, first_rank=first)
                first += count
            self._members, self._rooms = members, [PackingBuffer(device), PackingBuffer(device)]
        return self._places

    def joined(self) -> bool:
        """Return whether all are there. Ask again and again once the servers know of the group."""
        if self._joined is None:
            from vllm_fp8ext.update.transports.nccl.group import join

            place = next(iter(self._places.values()))
            with self._streaming():
                self._joined = join(place.backend, place.id, place.size, 0, self._members[0], self.seconds)
        return self._joined.joined()

    def room(self, ranks: Mapping[str, int], n: int, device: Any) -> PackingBuffer:
        """Return the room in which bucket `n` is packed. Of two rooms it is the one of the bucket before the last."""
        self.meet(ranks, device)
        return self._rooms[n % 2]

    def begin(self, data: Any) -> None:
        """Start to broadcast the bytes of a bucket."""
        assert self._joined is not None
        self._joined.begin(data)

    def done(self) -> bool:
        """Return whether that has ended on this side."""
        assert self._joined is not None
        return self._joined.done()

    def _streaming(self) -> AbstractContextManager[Any]:
        device = self._members[0]
        if device.type == "cpu":
            return contextlib.nullcontext()
        import torch

        streaming: AbstractContextManager[Any] = torch.cuda.stream(torch.cuda.Stream(device))
        return streaming

    def _nccl_id(self) -> str:
        try:
            return base64.b64encode(nccl.unique_id()).decode()
        except NcclError as error:
            raise ValueError(f"tensors on a GPU are broadcast by NCCL: {error}") from None

    def _store_id(self, url: str) -> str:
        from torch.distributed import TCPStore

        host = self._host or _own_address(url)
        listening = _listening(host)
        self._store = TCPStore(
            host,
            listening.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        return f"{host}:{self._store.port}/{secrets.token_hex(8)}"


def _listening(host: str) -> socket.socket:
    """At this address alone, where it is one of this machine."""
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    try:
        return socket.create_server(address, family=family)
    except OSError:
        return socket.create_server(("", 0))


def _own_address(url: str) -> str:
    """The address of this machine on the way to a server."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port or 80))
        address: str = probe.getsockname()[0]
        return address
