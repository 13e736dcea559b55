# SPDX-License-Identifier: Apache-2.0
"""Bodies read past uvicorn: from the socket straight to where they are wanted, on a thread.

uvicorn reads a body on the event loop, on which tokens are streamed, and copies each 256 KiB of it four times. This uses what
a request under its `httptools_impl.RequestResponseCycle` has: `transport`, `flow`, `body` and `keep_alive`. Can go once ASGI
can read a body into memory that the application has.
"""

import asyncio
import os
import select
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from vllm_fp8ext.serve.work import in_thread

_CYCLE = "uvicorn.protocols.http.httptools_impl", "RequestResponseCycle"
_STEP = 1 << 20
"""Bytes read at once, at most: what is done with them finds them in the cache."""
_TURN_SECONDS = 0.1
"""Longest time that a body has a thread before others have their turn."""
_PATIENCE_MS = 5
"""Longest time that a thread waits for more of it."""
_THREADS = ThreadPoolExecutor(len(os.sched_getaffinity(0)), "fp8ext-upload")
"""Reading takes a core, and a digest too. A body of which nothing comes waits without one."""


class Connection:
    """The connection by which a body comes, once it is taken over from uvicorn. It is closed after the answer."""

    def __init__(self, cycle: Any) -> None:
        self._cycle = cycle

    @classmethod
    def of(cls, scope: Any, receive: Any) -> Self | None:
        """Return the connection of a request; None where its bytes are not the body's, or do not come by uvicorn."""
        cycle: Any = getattr(receive, "__self__", None)
        if (type(cycle).__module__, type(cycle).__name__) != _CYCLE:
            return None
        # not by the scope's scheme: a proxy says there how its own client came
        if cycle.transport.get_extra_info("sslcontext") is not None:
            return None
        return None if any(name == b"transfer-encoding" for name, _ in scope["headers"]) else cls(cycle)

    def take_over(self) -> bytes:
        """uvicorn reads no further; what it has read, and not handed over yet."""
        cycle = self._cycle
        if cycle.transport.is_closing():
            return b""
        cycle.flow.pause_reading()
        cycle.keep_alive = False  # its parser waits for a body that it will not see
        read, cycle.body = bytes(cycle.body), bytearray()
        return read

    async def read_into(self, content: memoryview, idle_seconds: float, took: Callable[[int], None]) -> None:
        """Read on until `content` is full or the client has gone. `took` is called on a thread, with the number of bytes
        that are there as well now. A cancellation waits until no thread writes there.

        Raises:
            TimeoutError: nothing came for `idle_seconds`.
        """
        transport = self._cycle.transport
        if transport.is_closing() or not content:
            return
        descriptor = transport.get_extra_info("socket").fileno()
        with socket.socket(fileno=socket.dup(descriptor)) as source:
            source.setblocking(False)  # as it is already: `socket.setdefaulttimeout` may say otherwise
            reading = _Reading(source, content, took)
            while not reading.over:
                if not await in_thread(reading.turn, executor=_THREADS):
                    async with asyncio.timeout(idle_seconds):
                        await _readable(source)


class _Reading:
    """A body on its way from `source` into `rest`. `over`: it is there, or the client has gone."""

    def __init__(self, source: socket.socket, rest: memoryview, took: Callable[[int], None]) -> None:
        self.over = False
        self._source, self._rest, self._took = source, rest, took
        self._poller = select.poll()
        self._poller.register(source, select.POLLIN)

    def turn(self) -> bool:
        """Read for a while. False: nothing came at last."""
        end = time.monotonic() + _TURN_SECONDS
        while not self.over and time.monotonic() < end:
            try:
                count = self._source.recv_into(self._rest[:_STEP])
            except BlockingIOError:
                if not self._poller.poll(_PATIENCE_MS):
                    return False
                continue
            except OSError:
                count = 0
            self._rest = self._rest[count:]
            self.over = not count or not self._rest
            if count:
                self._took(count)
        return True


async def _readable(source: socket.socket) -> None:
    """Wait until something comes, or the client has gone."""
    loop = asyncio.get_running_loop()
    came = asyncio.Event()
    loop.add_reader(source, came.set)
    try:
        await came.wait()
    finally:
        loop.remove_reader(source)
