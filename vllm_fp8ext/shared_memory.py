# SPDX-License-Identifier: Apache-2.0
"""Segments of shared memory that vLLM's processes make: how much room they still claim, and which of them nobody needs any
more. Needs neither torch nor vLLM.

A segment has its size at once, and memory only where it was written to: whoever writes where no room is left is killed. A
process that is killed leaves its segments behind, so each writes down those that it makes.
"""

import contextlib
import os
import re
import shutil
import stat
from multiprocessing import util
from pathlib import Path

from vllm_fp8ext.lock_files import created, left_behind

FOLDER = "/dev/shm"
"""Folder of the segments."""
_RECORD = "fp8ext-", ".segments"
"""Begin and end of the names of records. Each process has one: lines of a segment's name and inode number."""
SPOOL = "fp8ext-", ".spool"
"""Begin and end of the names of files in which uploads wait. Each API server process has one."""
_SEGMENT = re.compile(r"(psm_|VLLM_OBJECT_STORAGE_SHM_BUFFER)[\w-]*")
_RECORD_BYTES = 1 << 16
_records: dict[int, int] = {}
"""Descriptors of records, by the process that made them: a forked process has those of its parent as well."""


def untouched_bytes(folder: str) -> int:
    """Return the bytes that segments beside `folder` claim but take no room for yet. Segments on its file system count."""
    there = {folder}
    if os.path.isdir(FOLDER) and os.stat(FOLDER).st_dev == os.stat(folder).st_dev:
        there.add(FOLDER)
    by_inode = {}
    for entry in (entry for place in there for entry in os.scandir(place)):
        if _SEGMENT.fullmatch(entry.name):
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                by_inode[status.st_ino] = max(status.st_size - status.st_blocks * 512, 0)
    return sum(by_inode.values())


def free_bytes(folder: str) -> int:
    """Return the free bytes of the file system of `folder`, without what segments will need; 0 where it has promised more
    than it has."""
    return max(shutil.disk_usage(folder).free - untouched_bytes(folder), 0)


def record(name: str, folder: str = FOLDER) -> None:
    """Write down a segment that this process has made.

    Raises:
        OSError: the folder is full, or there is none.
    """
    if os.getpid() not in _records:
        _records[os.getpid()], path = created(folder, *_RECORD)
        util.Finalize(None, _close, (path,), exitpriority=0)  # also where multiprocessing ends a process
    inode = os.stat(os.path.join(folder, name)).st_ino
    os.write(_records[os.getpid()], f"{name} {inode}\n".encode())


def remove_left(folder: str = FOLDER) -> None:
    """Remove the recorded segments of this user's processes that were killed, and no others."""
    for path, file in left_behind(folder, *_RECORD):
        if os.fstat(file.fileno()).st_uid != os.geteuid():  # anybody may write such a file
            continue
        for segment in _recorded(folder, file.read(_RECORD_BYTES)):
            with contextlib.suppress(OSError):
                segment.unlink()
        with contextlib.suppress(OSError):
            path.unlink()


def remove_left_spools(folder: str) -> None:
    """Remove the files of uploads of processes that were killed; others' stay."""
    for path, _ in left_behind(folder, *SPOOL):
        with contextlib.suppress(OSError):  # somebody else's
            path.unlink()


def _close(path: Path) -> None:
    """Remove the record of a process that ends, unless it leaves segments."""
    with contextlib.suppress(OSError):
        if not _recorded(str(path.parent), path.read_bytes()):
            path.unlink()


def _recorded(folder: str, record: bytes) -> list[Path]:
    """Return the segments of a record that are still there; another one may have got the name of one that is not."""
    segments = []
    for line in record.decode("ascii", "replace").splitlines():
        name, _, inode = line.partition(" ")
        if _SEGMENT.fullmatch(name):
            with contextlib.suppress(OSError):
                status = os.lstat(os.path.join(folder, name))
                if stat.S_ISREG(status.st_mode) and str(status.st_ino) == inode:
                    segments.append(Path(folder, name))
    return segments
