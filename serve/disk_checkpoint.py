# SPDX-License-Identifier: Apache-2.0
"""A checkpoint on the server's disk: which files it has, and which version of each."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.log_text import shown
from vllm_fp8ext.serve.allowed_dirs import AllowedDirs, AllowedPath
from vllm_fp8ext.update.contract.checkpoint_files import INDEX, SUFFIX, chosen, indexed_files
from vllm_fp8ext.update.contract.open_beneath import open_beneath
from vllm_fp8ext.update.contract.regular_file import Stamp, path_error, real_descriptor, stamp_of
from vllm_fp8ext.update.contract.safetensors_header import StoredTensor, require_names, stored_tensors


@dataclass(frozen=True, kw_only=True)
class DiskFile:
    """One version of a file of a checkpoint: `name` is where the checkpoint has it, `place` where its links lead."""

    name: str
    place: AllowedPath
    stamp: Stamp

    def tensors(self) -> list[StoredTensor]:
        """Every tensor of this version of a safetensors file.

        Raises:
            UpdateError: as `opened` and `safetensors_header.parse`; `invalid-name`.
        """
        with self.opened() as content:
            tensors = stored_tensors(content, self.name)
        require_names(tensors, self.name)
        return tensors

    @contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """This version as a binary file.

        Raises:
            UpdateError: `file-changed`: another one is there now; `not-found`, `unreadable`, also of what reading raises.
        """
        try:
            with os.fdopen(real_descriptor(self.place.folder, self.place.path), "rb") as content:
                if stamp_of(os.fstat(content.fileno())) != self.stamp:
                    raise changed(self.name)
                yield content
        except OSError as error:
            raise path_error(self.name, error) from None


@dataclass(frozen=True, kw_only=True)
class DiskCheckpoint:
    """Versions of a checkpoint's files, in order, and of the `index` that names them. `place`: the folder, or the one
    file."""

    place: AllowedPath
    files: tuple[DiskFile, ...]
    index: DiskFile | None = None

    @property
    def stamps(self) -> list[Stamp]:
        stamps = [file.stamp for file in self.files]
        return [*stamps, self.index.stamp] if self.index else stamps

    def require_unchanged(self, allowed: AllowedDirs) -> None:
        """Raise `file-changed` unless a look now finds the same versions of the same files."""
        try:
            now = look(allowed, self.place)
        except UpdateError:
            raise changed(self.place.path) from None
        differing = sorted({file.name for file in {*self._all} ^ {*now._all}})
        if differing:
            more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
            raise changed(differing[0] + more)

    @property
    def _all(self) -> tuple[DiskFile, ...]:
        return (*self.files, self.index) if self.index else self.files


def look(allowed: AllowedDirs, place: AllowedPath) -> DiskCheckpoint:
    """The checkpoint in a folder, or in a file; a link in the folder is followed if it leads to an allowed one.

    Raises:
        UpdateError: `not-found`, `unreadable`, `path-not-allowed`, or `file-changed` when something became a link meanwhile.
    """
    try:
        with _closing(place.open(os.O_PATH | os.O_DIRECTORY)) as descriptor:
            return _Folder(allowed, place, descriptor).checkpoint()
    except NotADirectoryError:
        return DiskCheckpoint(place=place, files=(_file(place),))
    except OSError as error:
        raise path_error(place.path, error) from None


def _file(place: AllowedPath) -> DiskFile:
    try:
        with _closing(place.open(os.O_PATH)) as descriptor:
            status = os.fstat(descriptor)
    except OSError as error:
        raise path_error(place.path, error) from None
    if stat.S_ISDIR(status.st_mode):  # it was none when it was opened as one
        raise changed(place.path)
    if not stat.S_ISREG(status.st_mode):
        message = f"{place.path}: expected a folder or a regular file, found a pipe, a socket or a device"
        raise UpdateError("unreadable", message, status=422)
    return DiskFile(name=place.path, place=place, stamp=stamp_of(status))


def changed(name: str) -> UpdateError:
    """For a file or folder that is not what it was when the reading began."""
    return UpdateError("file-changed", f"{name} was changed while it was read", status=409)


class _Folder:
    """An open folder: what is in it, whatever lies at its path by now."""

    def __init__(self, allowed: AllowedDirs, place: AllowedPath, descriptor: int) -> None:
        self._allowed = allowed
        self._place = place
        self._descriptor = descriptor

    def checkpoint(self) -> DiskCheckpoint:
        with _closing(open_beneath(self._descriptor, ".", os.O_RDONLY | os.O_DIRECTORY)) as listed:
            names = set(os.listdir(listed))
        index = self._file(INDEX) if INDEX in names else None
        named = self._named(index) if index else None
        checkpoint_names = {
            name for name in names if name.endswith(SUFFIX) and (named is None or name in named)
        }
        regular_files = {name: file for name in checkpoint_names if (file := self._file(name))}
        order = chosen(regular_files, named, self._place.path)
        return DiskCheckpoint(
            place=self._place, files=tuple(regular_files[name] for name in order), index=index
        )

    def _named(self, index: DiskFile) -> set[str]:
        with index.opened() as content:
            return indexed_files(content, index.name)

    def _file(self, name: str) -> DiskFile | None:
        """None of what is no file, but a folder, say."""
        path = f"{self._place.path}/{name}"
        if not _is_text(name):
            raise UpdateError("unreadable", f"{shown(path)}: expected a name in UTF-8", status=422)
        place = AllowedPath(folder=self._place.folder, path=path)
        try:
            descriptor = self._opened(name)
            if descriptor is None:
                target = os.readlink(name, dir_fd=self._descriptor)
                place = self._allowed.resolve(os.path.join(self._place.path, target), path)
                descriptor = place.open(os.O_PATH)
            with _closing(descriptor):
                status = os.fstat(descriptor)
        except OSError as error:
            raise path_error(path, error) from None
        if not stat.S_ISREG(status.st_mode):
            return None
        return DiskFile(name=path, place=place, stamp=stamp_of(status))

    def _opened(self, name: str) -> int | None:
        """None of a link."""
        try:
            return open_beneath(self._descriptor, name, os.O_PATH)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            return None


def _is_text(name: str) -> bool:
    """Return whether a file's name can be told to ranks and clients."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


@contextmanager
def _closing(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)
