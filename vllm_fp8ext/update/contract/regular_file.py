# SPDX-License-Identifier: Apache-2.0
"""Files on disk that somebody may write to or replace while they are read. Needs neither torch nor vLLM."""

import asyncio
import errno
import os
import stat
import time
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, NamedTuple

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract.open_beneath import open_real

TICK_SECONDS = 0.05
"""More than a tick of a file system's clock (4 to 10 ms on Linux): two changes within one tick have the same time."""
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
"""A pipe would be waited for otherwise until somebody writes to it. Of a regular file nothing changes."""
_MISSING = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
_REPLACED = (errno.ELOOP, errno.EXDEV, errno.ESTALE)


class Stamp(NamedTuple):
    """One version of a file. Whoever writes to it or replaces it changes the stamp, a tick after the change before that at
    the earliest; `changed_ns`, the inode's, can't be set back as `modified_ns` can. Times are Unix nanoseconds. A hard link
    that is made or removed changes `changed_ns` and not the file: where `links` differ, that time is not compared. A file
    that has lost its last name is another version."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int
    links: int = 1

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Stamp)
            and self[:4] == other[:4]
            and (self.changed_ns == other.changed_ns or self.links != other.links)
            and (self.links == 0) == (other.links == 0)
        )

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self[:4])


class NotRegularError(OSError):
    """There is something else at a path: a directory, a pipe, a device."""


def stamp_of(status: os.stat_result) -> Stamp:
    """The stamp of the version that `os.stat` or `os.fstat` found."""
    return Stamp(
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
        status.st_nlink,
    )


async def settle(stamps: Iterable[Stamp]) -> None:
    """Wait out the tick of a change that was made just now: whatever changes one of the files from the return on changes its
    stamp too."""
    now = time.time_ns()
    if any(abs(now - stamp.changed_ns) < TICK_SECONDS * 1e9 for stamp in stamps):
        await asyncio.sleep(TICK_SECONDS)


def descriptor_of(path: str | Path) -> int:
    """A descriptor for reading; waits for nobody.

    Raises:
        OSError: there is none that can be read.
        NotRegularError: it is no regular file.
    """
    return _regular(os.open(path, _FLAGS), path)


def real_descriptor(folder: str, path: str) -> int:
    """Open a path without links from the descriptor of a folder that holds it (`open_real`).

    Raises:
        OSError: also ELOOP, when a part of the path has become a link.
    """
    return _regular(open_real(folder, path, _FLAGS), path)


def opened(path: Path) -> BinaryIO:
    """A binary file."""
    return os.fdopen(descriptor_of(path), "rb")


def path_error(path: str | Path, error: OSError) -> UpdateError:
    """Return the error for a path that can't be opened: `not-found`, `unreadable` or `file-changed`."""
    reason = f"{path}: {error.strerror}"
    if error.errno in _MISSING:
        return UpdateError("not-found", reason, status=404)
    if error.errno in _REPLACED:
        return UpdateError("file-changed", f"{path} was changed before it was read", status=409)
    return UpdateError("unreadable", reason, status=422)


def _regular(descriptor: int, path: str | Path) -> int:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotRegularError(
            errno.EINVAL, "expected a regular file, found a directory, a pipe or a device", str(path)
        )
    return descriptor
