# SPDX-License-Identifier: Apache-2.0
"""The folders that checkpoints may be read from, and paths that lead into them.

A path is resolved first; only then is anything opened, from the descriptor of the allowed folder that holds it and through no
link (`update.contract.open_beneath`). Outside the allowed folders links are read, nothing is opened, and whatever goes
wrong there is one answer.
"""

import errno
import os
from collections.abc import Iterable
from dataclasses import dataclass

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract.open_beneath import open_real
from vllm_fp8ext.update.contract.regular_file import path_error

PATH_BYTES = 4095
"""Longest path that Linux takes."""
_LINKS = 40
"""Most links that Linux follows in one path."""


@dataclass(frozen=True, kw_only=True)
class AllowedPath:
    """A path without links that lay in an allowed folder, or was one, when resolved. Both are absolute. Both are absolute."""

    folder: str
    path: str

    def open(self, flags: int) -> int:
        """A descriptor; `flags` as for `os.open`.

        Raises:
            OSError: ELOOP when a part of the path has become a link.
        """
        return open_real(self.folder, self.path, flags)


class AllowedDirs:
    """`folders`: as set; links in them are resolved once, now."""

    def __init__(self, folders: Iterable[str] = ()) -> None:
        self._folders = tuple(os.path.realpath(folder) for folder in folders)

    def resolve(self, path: str, shown_path: str | None = None) -> AllowedPath:
        """Resolve a path, `shown_path` in messages; relative ones begin in the working folder.

        Raises:
            UpdateError: `path-not-allowed`: it ends outside the allowed folders, or gets lost there, or turns in circles;
                `not-found` or `unreadable`: an allowed folder does not have it; `invalid-request`: it can be no path.
        """
        shown_path = path if shown_path is None else shown_path
        _require_path(path)
        refused = UpdateError(
            "path-not-allowed", f"{shown_path} does not lead to a folder in allowed_dirs", status=403
        )
        real, rest = _begin(path, _working_folder())
        links, named = 0, False
        while rest:
            part = rest.pop()
            if part == "..":
                if named and not self._may_tell(real):  # only what is there could be left again
                    raise refused
                real = os.path.dirname(real)
                continue
            here, named = os.path.join(real, part), True
            try:
                target = os.readlink(here)
            except OSError as error:
                if error.errno == errno.EINVAL:  # no link
                    real = here
                    continue
                holder = self._holder(here)
                if holder is None:
                    raise refused from None
                raise path_error(shown_path, _why(holder, here)) from None
            links += 1
            if links > _LINKS:
                raise refused
            named = False
            real, more = _begin(target, real)
            rest += more
        folder = self._holder(real)
        if folder is None:
            raise refused
        _require_path(real)
        return AllowedPath(folder=folder, path=real)

    def _holder(self, path: str) -> str | None:
        return next((folder for folder in self._folders if _is_in(path, folder)), None)

    def _may_tell(self, path: str) -> bool:
        """Return whether this folder's existence is no secret: an allowed one, one in it or one on the way to it."""
        return self._holder(path) is not None or any(_is_in(folder, path) for folder in self._folders)


def _why(folder: str, path: str) -> OSError:
    """Return why a path in a folder is not there, without following a link. One may lie on the way by now."""
    try:
        os.close(open_real(folder, path, os.O_PATH))
    except OSError as error:
        return error
    return OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def _working_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was removed
        return "/"


def _begin(path: str, folder: str) -> tuple[str, list[str]]:
    """Return where to go on, and the parts of a path, the first one last."""
    parts = [part for part in reversed(path.split("/")) if part not in ("", ".")]
    return "/" if path.startswith("/") else folder, parts


def _is_in(path: str, folder: str) -> bool:
    return folder == "/" or path == folder or path.startswith(f"{folder}/")


def _require_path(path: str) -> None:
    try:
        length = len(path.encode())
    except UnicodeEncodeError:
        raise UpdateError(
            "invalid-request", "path: expected Unicode, found a surrogate", status=422
        ) from None
    if not 0 < length <= PATH_BYTES or "\0" in path:
        message = f"path: expected 1 to {PATH_BYTES} bytes, none of them NUL, found {length} bytes"
        raise UpdateError("invalid-request", message, status=422)
