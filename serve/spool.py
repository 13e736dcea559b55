# SPDX-License-Identifier: Apache-2.0
"""Uploaded bodies on their way to the ranks: files in shared memory, bounded, removed as soon as they are staged."""

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from vllm_fp8ext.errors import UpdateError


class Spool:
    """A folder of this server's own that holds at most `limit` bytes; an upload beyond it waits for room."""

    def __init__(self, folder: str, limit: int) -> None:
        parent = folder if os.path.isdir(folder) else tempfile.gettempdir()
        self.limit = min(limit, shutil.disk_usage(parent).free)
        self.folder = Path(tempfile.mkdtemp(prefix="fp8ext-", dir=parent))
        self._used = 0
        self._room = asyncio.Condition()

    def close(self) -> None:
        """Remove the folder and what is left in it."""
        shutil.rmtree(self.folder, ignore_errors=True)

    @asynccontextmanager
    async def receive(self, body: AsyncIterator[bytes], length: int | None) -> AsyncIterator[Path]:
        """Write a body of `length` bytes to a file that lives as long as the context.

        Raises:
            UpdateError: no length, a length beyond the spool, or a body of another length.
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
        async with self._room:
            await self._room.wait_for(lambda: self._used + length <= self.limit)
            self._used += length
        name = ""
        try:
            descriptor, name = tempfile.mkstemp(suffix=".safetensors", dir=self.folder)
            with os.fdopen(descriptor, "wb") as file:
                received = 0
                async for piece in body:
                    received += len(piece)
                    if received > length:
                        break
                    file.write(piece)
            if received != length:
                raise UpdateError(
                    "truncated",
                    f"the body should have {length} bytes, found {received}",
                    status=400,
                    expected=length,
                )
            yield Path(name)
        except OSError as error:
            raise UpdateError("spool-failed", f"{self.folder}: {error}", status=507) from error
        finally:
            if name:
                os.unlink(name)
            async with self._room:
                self._used -= length
                self._room.notify_all()
