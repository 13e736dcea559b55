# SPDX-License-Identifier: Apache-2.0
"""A server rank's membership in vLLM's stateless process group of a trainer and its servers. No method waits.

Processes find each other by a TCP store that rank 0 runs. Through it NCCL's unique id comes pickled, as vLLM sends it; it is
read without unpickling anything. Without GPUs Gloo stands in for NCCL, and each broadcast comes after one of its length.
"""

import base64
import pickletools
import socket
import threading
import time
from concurrent.futures import Future
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.kernels.runtime.nccl import ID_BYTES
from vllm_fp8ext.update.transports.native.message import NativeSource
from vllm_fp8ext.update.transports.nccl.group import GlooGroup, GroupMember, NcclGroup

GLOO_PREFIX = "fp8ext-gloo"
"""Prefix of the store's keys by which Gloo's processes find each other."""
_ID_KEY = "broadcast_from/0/0"
"""Key under which `StatelessProcessGroup.broadcast_obj` keeps what rank 0 sends first."""
_LOOK_SECONDS = 0.02
_LONGEST_ID = 4096
_CONNECT_SECONDS = 0.5
_BEYOND_SECONDS = 5.0


def join(source: NativeSource, rank: int, device: torch.device) -> GroupMember:
    """Start to join the group as its member `rank`; on a GPU NCCL works on the stream that is the current one now.

    Raises:
        UpdateError: `transfer-failed`.
    """
    if source.backend == "gloo":
        return NativeGlooGroup(source, rank)
    return NativeNcclGroup(source, rank, device)


class NativeNcclGroup:
    """A group between GPUs, as vLLM's `PyNcclCommunicator` makes it: after joining, all ranks add up one number."""

    def __init__(self, source: NativeSource, rank: int, device: torch.device) -> None:
        self.device = device
        self._size, self._rank = source.size, rank
        self._left = threading.Event()
        self._id: Future[bytes] = Future()
        self._group: NcclGroup | None = None
        self._warm_up: Tensor | None = None
        self._warm = False
        if source.unique_id is not None:
            self._id.set_result(base64.b64decode(source.unique_id))
            return
        threading.Thread(target=self._fetch_id, args=(source,), daemon=True).start()

    def joined(self) -> bool:
        if self._group is None:
            if not self._id.done():
                return False
            self._group = NcclGroup(self._fetched(), self._size, self._rank, self.device)
        if self._warm_up is None:
            if not self._group.joined():
                return False
            self._warm_up = torch.zeros(1, dtype=torch.float32, device=self.device)
            self._group.begin_sum(self._warm_up)
        self._warm = self._warm or self._group.done()
        return self._warm

    def begin(self, data: Tensor) -> None:
        assert self._group is not None
        self._group.begin(data)

    def done(self) -> bool:
        assert self._group is not None
        return self._group.done()

    def close(self) -> None:
        self._left.set()
        if self._group is not None:
            self._group.close()

    def _fetched(self) -> bytes:
        try:
            return self._id.result()
        except (RuntimeError, ValueError) as error:
            raise _failed(str(error)) from error

    def _fetch_id(self, source: NativeSource) -> None:
        try:
            until = time.monotonic() + source.seconds + _BEYOND_SECONDS
            store = _store(source, self._left, until)
            while not store.check([_ID_KEY]):
                _require_joining(self._left, until)
                time.sleep(_LOOK_SECONDS)
            self._id.set_result(pickled_id(store.get(_ID_KEY)))
        except Exception as error:
            self._id.set_exception(error)


class NativeGlooGroup(GlooGroup):
    """A group between CPUs."""

    def __init__(self, source: NativeSource, rank: int) -> None:
        self._source = source
        self._data: Tensor | None = None
        self._length = torch.zeros(1, dtype=torch.int64)
        super().__init__("", source.size, rank, source.seconds)

    def begin(self, data: Tensor) -> None:
        self._data = data
        super().begin(self._length)

    def done(self) -> bool:
        """Tell whether the broadcast has ended.

        Raises:
            UpdateError: `transfer-failed`: another number of bytes is sent than was announced.
        """
        if not super().done():
            return False
        if self._data is None:
            return True
        data, self._data, sent = self._data, None, int(self._length)
        if sent != data.numel():
            raise _failed(f"expected a broadcast of {data.numel()} bytes, as announced, found one of {sent}")
        super().begin(data)
        return super().done()

    def _join(self, id: str, size: int, rank: int, seconds: float) -> None:
        try:
            until, timeout = time.monotonic() + seconds, timedelta(seconds=seconds)
            store = _store(self._source, self._left, until)
            self._await_sender(store, GLOO_PREFIX, until)
            self._joining.set_result(ProcessGroupGloo(PrefixStore(GLOO_PREFIX, store), rank, size, timeout))
        except Exception as error:
            self._joining.set_exception(error)


def pickled_id(content: bytes) -> bytes:
    """Return the bytes of a pickled `ncclUniqueId`. Nothing of the pickle is executed.

    Raises:
        ValueError: it holds something else.
    """
    if len(content) > _LONGEST_ID:
        raise ValueError(f"expected NCCL's unique id in the trainer's store, found {len(content)} bytes")
    strings = [argument for _, argument, _ in pickletools.genops(content) if isinstance(argument, bytes)]
    if [len(string) for string in strings] != [ID_BYTES]:
        raise ValueError(f"expected NCCL's unique id of {ID_BYTES} bytes in the trainer's store, found none")
    return strings[0]


def _store(source: NativeSource, left: threading.Event, until: float) -> TCPStore:
    """Connect with the trainer's store, whose owner waits until all processes have done so."""
    assert source.host is not None
    assert source.port is not None
    _reach(source.host, source.port, left, until)
    timeout = timedelta(seconds=max(1.0, until - time.monotonic()))
    return TCPStore(
        source.host,
        source.port,
        source.size,
        is_master=False,
        wait_for_workers=True,  # counts this process; a client does not wait
        timeout=timeout,
        use_libuv=False,
    )


def _reach(host: str, port: int, left: threading.Event, until: float) -> None:
    """Wait until somebody listens there: nothing breaks a store off that is connecting."""
    while True:
        try:
            return socket.create_connection((host, port), _CONNECT_SECONDS).close()
        except OSError:
            _require_joining(left, until)
            time.sleep(_LOOK_SECONDS)


def _require_joining(left: threading.Event, until: float) -> None:
    if left.is_set() or time.monotonic() > until:
        raise RuntimeError("the group was left before all were there")


def _failed(message: str) -> UpdateError:
    return UpdateError("transfer-failed", message.splitlines()[0])
