# SPDX-License-Identifier: Apache-2.0
"""A file on disk that somebody may write to, replace, or put something else in place of while it is read. Needs neither torch
nor vLLM."""

import asyncio
import errno
import os
import stat
import time
from pathlib import Path
from typing import BinaryIO

Stamp = tuple[int, int, int, int]

TICK_SECONDS = 0.05
"""More than a tick of a file system's clock (4 to 10 ms on Linux): two changes within one tick have the same time."""
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
"""A pipe would be waited for otherwise until somebody writes to it. Of a regular file nothing changes."""


class NotRegularError(OSError):
    """There is something else at a path: a directory, a pipe, a device."""


def stamp_of(status: os.stat_result) -> Stamp:
    """What changes when a file is written to or replaced, a tick after the change before that at the earliest."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


async def settled_stamp(path: Path) -> Stamp:
    """The stamp of a file, not of what it links to. Whatever changes the file from the return on changes the stamp too: when
    the file was changed just now, the tick of that change is over."""
    status = path.lstat()
    if abs(time.time() - status.st_mtime) < TICK_SECONDS:
        await asyncio.sleep(TICK_SECONDS)
    return stamp_of(status)


def descriptor_of(path: str | Path) -> int:
    """A descriptor for reading; waits for nobody.

    Raises:
        OSError: there is none that can be read.
        NotRegularError: it is no regular file.
    """
    descriptor = os.open(path, _FLAGS)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotRegularError(
            errno.EINVAL, "expected a regular file, found a directory, a pipe or a device", str(path)
        )
    return descriptor


def opened(path: Path) -> BinaryIO:
    """The same as a binary file."""
    return os.fdopen(descriptor_of(path), "rb")
