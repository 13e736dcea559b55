# SPDX-License-Identifier: Apache-2.0
"""Writes the pieces of a body on another thread, some megabytes at a time: the event loop, on which tokens are streamed, only
collects them."""

import asyncio
import os
from pathlib import Path

from vllm_fp8ext.errors import UpdateError

_BATCH_BYTES = 4 << 20
_BATCH_PIECES = 512
"""Below the 1024 buffers that one system call takes."""


class BatchWriter:
    """Appends to the open file `descriptor` of this `path` from `offset` on, until `stop`; `written` bytes are there. The
    descriptor may be closed meanwhile."""

    def __init__(self, descriptor: int, path: Path, offset: int) -> None:
        self.written = 0
        self._path = path
        self._descriptor = os.dup(descriptor)
        self._offset = offset
        self._batch: list[bytes] = []
        self._size = 0
        self._writing: asyncio.Task[int] | None = None

    async def add(self, piece: bytes) -> None:
        """Take a piece. Waits for the batch before when this one is full: a body does not run away from its file.

        Raises:
            UpdateError: `spool-failed`.
        """
        self._batch.append(piece)
        self._size += len(piece)
        if self._size >= _BATCH_BYTES or len(self._batch) >= _BATCH_PIECES:
            await self._flush()

    async def finish(self) -> None:
        """Write what is left.

        Raises:
            UpdateError: `spool-failed`.
        """
        await self._flush()
        await self._settle()

    async def stop(self) -> None:
        """Wait until nothing is being written any more, whatever becomes of it: the place may be given to another."""
        if self._writing is not None:
            await asyncio.wait({self._writing})
            self._writing.exception()  # it was told, or nobody asks
        os.close(self._descriptor)

    async def _flush(self) -> None:
        await self._settle()
        batch, self._batch, self._size = self._batch, [], 0
        if batch:
            start = self._offset + self.written
            self._writing = asyncio.create_task(asyncio.to_thread(_write, self._descriptor, batch, start))

    async def _settle(self) -> None:
        if self._writing is None:
            return
        try:
            self.written += await asyncio.shield(self._writing)
        except OSError as error:
            raise UpdateError("spool-failed", f"{self._path}: {error}", status=507) from error
        self._writing = None


def _write(descriptor: int, batch: list[bytes], offset: int) -> int:
    """Write all pieces one after the other; returns their bytes.

    Not through a map: a full folder is an error here, where it would be a signal there.
    """
    total = sum(map(len, batch))
    done = os.pwritev(descriptor, batch, offset)
    rest = memoryview(b"".join(batch))[done:] if done < total else memoryview(b"")
    while rest:  # a folder that is almost full takes a part first, without an error
        written = os.pwrite(descriptor, rest, offset + done)
        rest, done = rest[written:], done + written
    return total
