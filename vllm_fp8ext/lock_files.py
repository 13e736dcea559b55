# SPDX-License-Identifier: Apache-2.0
"""Files that are locked while their process, or one that it forked, lives. So files of killed processes can be told from
the others. Needs neither torch nor vLLM."""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from vllm_fp8ext.update.contract.regular_file import opened


def created(folder: str, prefix: str, suffix: str) -> tuple[int, Path]:
    """Make a locked file that only this user may read; returns its descriptor and path."""
    while True:
        descriptor, name = tempfile.mkstemp(prefix=prefix, suffix=suffix, dir=folder)
        if _locked(descriptor) and os.path.exists(name):
            return descriptor, Path(name)
        os.close(descriptor)  # another process begins at this moment, and takes it for one that was left


def left_behind(folder: str, prefix: str, suffix: str) -> Iterator[tuple[Path, BinaryIO]]:
    """Yield each file of that name that nobody locks. It is locked and open for reading until the next is taken."""
    for path in Path(folder).glob(f"{prefix}*{suffix}"):
        with contextlib.suppress(OSError), opened(path) as file:  # locked, or somebody else's
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield path, file


def _locked(descriptor: int) -> bool:
    """Lock the file; False if somebody else has the lock. A file system without locks has nobody."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
