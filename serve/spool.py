# SPDX-License-Identifier: Apache-2.0
"""Uploaded bodies on their way to the ranks: one bounded file in shared memory that every rank maps, used over and over.

A body gets an extent of the file for as long as it lives; one that finds no room waits for its turn, and its client with
it: nothing is read from its connection meanwhile. Room is taken from the folder as bodies need it.
"""

import asyncio
import errno
import mmap
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from vllm_fp8ext.errors import ConfigError, UpdateError
from vllm_fp8ext.lock_files import created
from vllm_fp8ext.serve.body_buffer import BodyBuffer
from vllm_fp8ext.serve.connection import Connection
from vllm_fp8ext.serve.content_digest import ContentDigest
from vllm_fp8ext.serve.range_allocator import PAGE, RangeAllocator
from vllm_fp8ext.serve.work import in_thread
from vllm_fp8ext.shared_memory import SPOOL, free_bytes, remove_left_spools, untouched_bytes

_CLAIMED = "that vLLM's shared memory has claimed and not yet taken"
_MORE = "Give the container more shared memory (docker run --shm-size=8g), or choose another spool_dir"


@dataclass(frozen=True)
class ReceivedBody:
    """A received body: `length` bytes at `offset` of `path`, mapped here as `content`."""

    path: str
    offset: int
    length: int
    content: memoryview


class Spool:
    """One file of `limit` bytes, or of one of so many `processes` that share these. `idle_seconds`: longest time between two
    pieces of a body.

    Raises:
        ConfigError: the folder can't hold the file.
    """

    def __init__(self, folder: str, limit: int, idle_seconds: float = 60.0, processes: int = 1) -> None:
        if not os.path.isdir(folder):
            raise ConfigError(f"spool_dir: expected a folder, found none at {folder}")
        remove_left_spools(folder)
        self._claimed = untouched_bytes(folder)
        self._processes = processes
        self.limit = min(limit, free_bytes(folder)) // processes // PAGE * PAGE
        if not self.limit:
            message = f"spool_dir: {folder} is full: {shutil.disk_usage(folder).free} bytes are free"
            raise ConfigError(f"{message}, {self._claimed} of them {_CLAIMED}. {_MORE}")
        self._descriptor, self.path = created(folder, *SPOOL)
        os.ftruncate(self._descriptor, self.limit)
        self._content = memoryview(mmap.mmap(self._descriptor, self.limit))
        self._backed: list[tuple[int, int]] = []
        """From where to where the folder has given room."""
        self._idle_seconds = idle_seconds
        self._room = RangeAllocator(self.limit)

    def require_room(self, size: int, what: str) -> None:
        """Raises `ConfigError` when a body of `size` bytes, which `what` describes, could never be sent."""
        if size > self.limit:
            each = f" for each of {self._processes} API server processes" if self._processes > 1 else ""
            raise ConfigError(
                f"uploads wait in {self.path.parent}, where {self.limit} bytes are free or allowed{each} beside "
                f"{self._claimed} {_CLAIMED}; {what} takes {size}. {_MORE} or a larger spool_bytes"
            )

    def close(self) -> None:
        """Remove the file; ranks that have it mapped keep what they read, bodies under way their extents."""
        self.path.unlink(missing_ok=True)
        self._content = memoryview(b"")
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    @asynccontextmanager
    async def receive(
        self,
        body: AsyncIterator[bytes],
        length: int | None,
        digest: ContentDigest | None = None,
        connection: Connection | None = None,
    ) -> AsyncIterator[ReceivedBody]:
        """Take a body of `length` bytes; its extent is free again when the context is left, unless by `engine-timeout`.

        `connection`: by which it comes, if it can be read from there; what follows the first piece of `body` is.

        Raises:
            UpdateError: no length, a length beyond the file, or beyond what silent ranks leave of it, a body of another
                length, one that stopped coming, one of another digest, or a full folder.
        """
        if length is None:
            raise UpdateError("length-required", "expected a Content-Length header", status=411)
        if length > self.limit:
            raise UpdateError(
                "chunk-too-large",
                f"a chunk may have {self.limit} bytes, found {length}",
                status=413,
                limit=self.limit,
            )
        if not self._content:
            raise UpdateError("spool-failed", f"{self.path}: closed, since the server ends", status=507)
        offset = await self._reserve(length)
        in_use = False
        try:
            received = ReceivedBody(str(self.path), offset, length, self._content[offset : offset + length])
            await self._fill(BodyBuffer(received.content, digest), body, connection)
            yield received
        except UpdateError as error:
            # ranks that have not answered may still read it: what another upload puts there would be staged for this one
            in_use = error.kind == "engine-timeout"
            raise
        finally:
            if in_use:
                self._room.lose(offset, length)
            else:
                self._room.give_back(offset, length)

    async def _reserve(self, length: int) -> int:
        offset = await self._room.take(length)
        try:
            await self._back(offset, offset + length)
        except BaseException:
            self._room.give_back(offset, length)
            raise
        return offset

    async def _back(self, start: int, end: int) -> None:
        """Have the folder's room from `start` to `end`: who writes to a map where there is none is killed. What was had once
        stays."""
        for first, last in _between(start, end, self._backed):
            try:
                await in_thread(_allocate, os.dup(self._descriptor), str(self.path.parent), first, last)
            except OSError as error:
                message = f"{self.path}: {error.strerror}"
                raise UpdateError("spool-failed", message, status=507) from error
            self._backed = _joined([*self._backed, (first, last)])

    async def _fill(
        self, filling: BodyBuffer, body: AsyncIterator[bytes], connection: Connection | None
    ) -> None:
        try:
            await self._copy(filling, body, connection)
            if connection is not None:
                await connection.read_into(filling.rest, self._idle_seconds, filling.took)
        except TimeoutError:
            came = f"{filling.filled} of {len(filling.content)} bytes"
            message = f"nothing came for {self._idle_seconds:g} s after {came}"
            raise UpdateError("upload-stalled", message, status=408) from None
        if filling.rest:
            raise _of_another_length(filling, filling.filled)
        if filling.digest is not None:
            await in_thread(filling.verify)

    async def _copy(
        self, filling: BodyBuffer, body: AsyncIterator[bytes], connection: Connection | None
    ) -> None:
        """Take the pieces of a body; of one whose connection can be read, those that have been read already."""
        loop = asyncio.get_running_loop()
        renewed = loop.time()
        async with asyncio.timeout_at(renewed + self._idle_seconds) as limit:
            async for piece in body:
                if len(piece) > len(filling.rest):
                    raise _of_another_length(filling, filling.filled + len(piece))
                filling.copy(piece)
                if connection is not None and filling.rest:
                    filling.copy(connection.take_over())
                    return
                if filling.behind:
                    await in_thread(filling.hash)
                now = loop.time()
                if now - renewed > self._idle_seconds / 16:  # cheaper than at every piece
                    limit.reschedule(now + self._idle_seconds)
                    renewed = now


def _between(start: int, end: int, ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the parts of a range that lie in none of these. They are sorted and apart."""
    gaps = []
    for first, last in [*ranges, (end, end)]:
        if start < min(first, end):
            gaps.append((start, min(first, end)))
        start = max(start, last)
    return gaps


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """These ranges, sorted, those that meet in one."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if joined and first <= -(-joined[-1][1] // PAGE) * PAGE:
            joined[-1] = (joined[-1][0], max(joined[-1][1], last))
        else:
            joined.append((first, last))
    return joined


def _of_another_length(filling: BodyBuffer, received: int) -> UpdateError:
    expected = len(filling.content)
    message = f"the body should have {expected} bytes, found {received}"
    return UpdateError("truncated", message, status=400, expected=expected)


def _allocate(descriptor: int, folder: str, start: int, end: int) -> None:
    try:
        room = free_bytes(folder)
        if end - start > room:
            message = f"expected {end - start} bytes more, found {room} free beside those {_CLAIMED}"
            raise OSError(errno.ENOSPC, message)
        os.posix_fallocate(descriptor, start, end - start)
    finally:
        os.close(descriptor)
