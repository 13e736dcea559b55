# SPDX-License-Identifier: Apache-2.0
"""Bodies read past uvicorn: from the socket straight to where they are wanted, on a thread.

uvicorn reads a body on the event loop, on which tokens are streamed, and copies each 256 KiB of it four times. This uses what
a request under its `httptools_impl.RequestResponseCycle` has: `transport`, `flow`, `body` and `keep_alive`. Can go once ASGI
can read a body into memory that the application has.
"""

import asyncio
import select
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

_CYCLE = "uvicorn.protocols.http.httptools_impl", "RequestResponseCycle"
_STEP = 1 << 20
"""Bytes read at once, at most: what is done with them finds them in the cache."""
_THREADS = ThreadPoolExecutor(32, "fp8ext-upload")
"""For bodies alone: one that stops coming holds its thread until it is given up."""


class Connection:
    """The connection by which a body comes, once it is taken over from uvicorn. It is closed after the answer."""

    def __init__(self, cycle: Any) -> None:
        self._cycle = cycle

    @classmethod
    def of(cls, scope: Any, receive: Any) -> Self | None:
        """That of a request; None where its bytes are not the body's, or do not come by uvicorn."""
        cycle = getattr(receive, "__self__", None)
        if (type(cycle).__module__, type(cycle).__name__) != _CYCLE or scope["scheme"] != "http":
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
        """Read on until `content` is full or the client has gone. `took` is called on the thread, with the number of bytes
        that are there as well now. A cancellation waits for its end.

        Raises:
            TimeoutError: nothing came for `idle_seconds`.
        """
        transport = self._cycle.transport
        if transport.is_closing() or not content:
            return
        descriptor = transport.get_extra_info("socket").fileno()
        with socket.socket(fileno=socket.dup(descriptor)) as source:
            source.setblocking(
                False
            )  # as it is; of this object it would be another by `socket.setdefaulttimeout`
            loop = asyncio.get_running_loop()
            reading = loop.run_in_executor(_THREADS, _read, source, content, idle_seconds, took)
            try:
                await asyncio.shield(reading)
            except asyncio.CancelledError:
                source.shutdown(socket.SHUT_RD)
                await asyncio.wait({reading})
                raise


def _read(
    source: socket.socket, content: memoryview, idle_seconds: float, took: Callable[[int], None]
) -> None:
    poller = select.poll()
    poller.register(source, select.POLLIN)
    start = 0
    while start < len(content):
        try:
            count = source.recv_into(content[start : start + _STEP])
        except BlockingIOError:
            if not poller.poll(idle_seconds * 1000):
                raise TimeoutError from None
            continue
        except ConnectionError:
            return
        if not count:
            return
        start += count
        took(count)
