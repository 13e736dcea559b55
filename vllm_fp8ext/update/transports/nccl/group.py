# SPDX-License-Identifier: Apache-2.0
"""Membership in a group of processes to which a trainer broadcasts: rank 0 sends, the others receive. No method waits."""

import contextlib
import socket
import threading
import time
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.kernels.runtime.nccl import Communicator, NcclError
from vllm_fp8ext.update.transports.nccl.message import nccl_id

_CONNECT_SECONDS = 0.5
"""Seconds in which a connection has to be made, or it is tried again."""
_POLL_SECONDS = 0.02
"""Seconds between two looks for the sender."""
_LINGERING = 8
"""Groups, at most, that were left and have not ended: each has a thread, and the memory into which it receives."""


class GroupMember(Protocol):
    """One process's membership. Once the group failed, every method but `close` raises `UpdateError` `transfer-failed`."""

    device: torch.device
    """Device of its buckets."""

    def joined(self) -> bool:
        """Tell whether all processes are there."""

    def begin(self, data: Tensor) -> None:
        """Start to broadcast bytes in a joined group.

        `data`: uint8 `[n]`, the same n in all processes, on `device`.
        """

    def done(self) -> bool:
        """Tell whether the broadcast has ended here. Until then the bytes must stay as they are."""

    def close(self) -> None:
        """Leave the group. A broadcast breaks off; its bytes may not be used for anything else."""


def join(
    backend: str, id: str, size: int, rank: int, device: torch.device, seconds: float
) -> "NcclGroup | GlooGroup":
    """Start to join a group, as `BroadcastSource` describes it.

    `device`: the process's own. On it, NCCL works on the stream that is the current one now.

    Raises:
        UpdateError: `transfer-failed`.
    """
    if backend == "gloo":
        return GlooGroup(id, size, rank, seconds)
    if device.type != "cuda":
        raise _failed(f"expected backend gloo on device {device}, found {backend}")
    return NcclGroup(nccl_id(id), size, rank, device)


class NcclGroup:
    """Broadcasts between GPUs."""

    def __init__(self, id: bytes, size: int, rank: int, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.current_stream(device)
        self._ended: torch.cuda.Event | None = None
        try:
            with torch.cuda.device(device):
                self._communicator = Communicator(id, size, rank)
        except NcclError as error:
            raise _failed(str(error)) from error

    def joined(self) -> bool:
        try:
            return self._communicator.ready()
        except NcclError as error:
            raise _failed(str(error)) from error

    def begin(self, data: Tensor) -> None:
        self._ended = None
        try:
            with torch.cuda.device(self.device):
                self._communicator.broadcast(data.data_ptr(), data.numel(), self._stream.cuda_stream)
        except NcclError as error:
            raise _failed(str(error)) from error

    def begin_sum(self, data: Tensor) -> None:
        """Start to add up fp32 numbers of all ranks, in place."""
        self._ended = None
        try:
            with torch.cuda.device(self.device):
                self._communicator.all_reduce(data.data_ptr(), data.numel(), self._stream.cuda_stream)
        except NcclError as error:
            raise _failed(str(error)) from error

    def done(self) -> bool:
        if not self.joined():  # not yet on the stream: an event would be recorded before it
            return False
        if self._ended is None:
            self._ended = self._stream.record_event()
        return bool(self._ended.query())

    def close(self) -> None:
        with torch.cuda.device(self.device):
            self._communicator.abort()


class GlooGroup:
    """Broadcasts between CPUs.

    `id`: `host:port/name`. `seconds`: how long its callers wait; Gloo's own threads then give up too.

    Raises:
        UpdateError: `transfer-failed`, when too many that were left have not ended yet.
    """

    _lingering: ClassVar[set[threading.Thread]] = set()

    def __init__(self, id: str, size: int, rank: int, seconds: float) -> None:
        self.device = torch.device("cpu")
        self._lingering.difference_update([thread for thread in self._lingering if not thread.is_alive()])
        if len(self._lingering) >= _LINGERING:
            raise _failed(f"{len(self._lingering)} groups that were given up have not ended: try again later")
        self._left = threading.Event()
        self._joining: Future[Any] = Future()
        self._work: Any = None
        thread = threading.Thread(target=self._join, args=(id, size, rank, seconds + 5))
        thread.daemon = True
        thread.start()

    def joined(self) -> bool:
        if self._joining.done():
            self._group()
            return True
        return False

    def begin(self, data: Tensor) -> None:
        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        try:
            self._work = self._group().broadcast([data], options)
        except RuntimeError as error:
            raise _failed(str(error)) from error

    def done(self) -> bool:
        if not self._work.is_completed():
            return False
        try:
            self._work.wait()
        except RuntimeError as error:
            raise _failed(str(error)) from error
        return True

    def close(self) -> None:
        """Leave the group (`GroupMember.close`).

        Gloo can't break off what it does, and waits for it when it goes: a thread of its own does that, until the others
        leave, too, or the time is over.
        """
        self._left.set()
        thread = threading.Thread(target=_wait_for_end, args=(self._joining, self._work), daemon=True)
        self._lingering.add(thread)
        thread.start()

    def _group(self) -> Any:
        try:
            return self._joining.result()
        except (RuntimeError, ValueError) as error:
            raise _failed(str(error)) from error

    def _join(self, id: str, size: int, rank: int, seconds: float) -> None:
        try:
            address, _, name = id.partition("/")
            host, _, port = address.rpartition(":")
            until, timeout = time.monotonic() + seconds, timedelta(seconds=seconds)
            self._reach(host, int(port), until)
            store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
            if rank:
                self._await_sender(store, name, until)
            self._joining.set_result(ProcessGroupGloo(PrefixStore(name, store), rank, size, timeout))
        except Exception as error:
            self._joining.set_exception(error)

    def _reach(self, host: str, port: int, until: float) -> None:
        """Wait until somebody listens there: nothing breaks a store off that is connecting."""
        while True:
            try:
                return socket.create_connection((host, port), _CONNECT_SECONDS).close()
            except OSError:
                self._require_joining(until)

    def _await_sender(self, store: TCPStore, name: str, until: float) -> None:
        """Wait until rank 0 has written to the store: nothing breaks a group off that is being made."""
        while not any(key.startswith(f"{name}/") for key in store.list_keys()):
            self._require_joining(until)

    def _require_joining(self, until: float) -> None:
        if self._left.wait(_POLL_SECONDS) or time.monotonic() > until:
            raise RuntimeError("the group was left before all were there")


def _wait_for_end(joining: Future[Any], work: Any) -> None:
    with contextlib.suppress(RuntimeError, ValueError):
        joining.result()
        if work is not None:
            work.wait()


def _failed(message: str) -> UpdateError:
    return UpdateError("transfer-failed", message.splitlines()[0])
