# SPDX-License-Identifier: Apache-2.0
"""Versions of a checkpoint's files: a reader must read all files of one version. Needs neither torch nor vLLM."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract.checkpoint_files import INDEX, checkpoint_files
from vllm_fp8ext.update.contract.regular_file import TICK_SECONDS, Stamp, opened, stamp_of


@dataclass(frozen=True)
class Snapshot:
    """Files of a checkpoint, in order, with their stamps and that of the index."""

    files: tuple[Path, ...]
    stamps: Mapping[Path, Stamp]

    @classmethod
    def of(cls, checkpoint: Path) -> Self:
        """The files as they are now; a link to the checkpoint is followed once, here. Whatever changes them from the return
        on is noticed.

        Raises:
            UpdateError: as `checkpoint_files`; `file-changed`: a file was removed meanwhile.
        """
        real = Path(os.path.realpath(checkpoint))
        files = checkpoint_files(real)
        index = real / INDEX
        statuses = {file: _status(file) for file in [*files, *([index] if index.is_file() else [])]}
        newest = max(max(status.st_mtime, status.st_ctime) for status in statuses.values())
        if abs(time.time() - newest) < TICK_SECONDS:
            time.sleep(TICK_SECONDS)
        return cls(tuple(files), {file: stamp_of(status) for file, status in statuses.items()})

    @contextmanager
    def opened(self, file: Path) -> Iterator[BinaryIO]:
        """One of the files, of its version.

        Raises:
            UpdateError: `file-changed`.
        """
        with opened_version(file, self.stamps[file]) as content:
            yield content

    def require_unchanged(self) -> None:
        """Raise `file-changed` unless all files are what they were."""
        for file, stamp in self.stamps.items():
            if stamp_of(_status(file)) != stamp:
                raise _changed(file)


@contextmanager
def opened_version(file: Path, stamp: Stamp) -> Iterator[BinaryIO]:
    """This version of a file.

    Raises:
        UpdateError: `file-changed`: another one is there, or none.
    """
    try:
        content = opened(file)
    except OSError:
        raise _changed(file) from None
    with content:
        if stamp_of(os.fstat(content.fileno())) != stamp:
            raise _changed(file)
        yield content


def _status(file: Path) -> os.stat_result:
    try:
        return file.stat()
    except OSError:
        raise _changed(file) from None


def _changed(file: Path) -> UpdateError:
    return UpdateError("file-changed", f"{file} was changed while it was read", status=409)
