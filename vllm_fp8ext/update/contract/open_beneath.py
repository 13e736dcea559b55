# SPDX-License-Identifier: Apache-2.0
"""Opens what lies beneath a folder, and never through a symbolic link. Needs neither torch nor vLLM.

Between a look at a path and its opening, anyone who may write to a folder on the way can put a link in its place. The kernel
checks each part of the path while it opens it (`openat2`). Where that call is missing (Linux before 5.6, some sandboxes), the
parts are opened one by one.
"""

import ctypes
import errno
import functools
import os
import stat

_OPENAT2 = 437
"""Number of the system call, on every architecture."""
_NO_SYMLINKS = 0x04
_BENEATH = 0x08
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_ATTEMPTS = 100


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def open_beneath(folder: int, path: str, flags: int) -> int:
    """Open a relative path from a folder's descriptor; `flags` as for `os.open`, closed on exec.

    Raises:
        OSError: as `os.open`; ELOOP: a part of the path is a symbolic link; EXDEV: it leads out of the folder.
    """
    opens = _at_once if _has_openat2() else _step_by_step
    return opens(folder, path, flags | os.O_CLOEXEC)


def open_real(folder: str, path: str, flags: int) -> int:
    """Open a path without links from the descriptor of a folder above it. Both are absolute.

    Raises:
        OSError: as `open_beneath`.
    """
    root = os.open("/", _FOLDER)
    try:
        holder = open_beneath(root, folder.lstrip("/") or ".", _FOLDER)
    finally:
        os.close(root)
    try:
        return open_beneath(holder, path.removeprefix(folder).lstrip("/") or ".", flags)
    finally:
        os.close(holder)


def _at_once(folder: int, path: str, flags: int) -> int:
    how = _OpenHow(flags, 0, _BENEATH | _NO_SYMLINKS)
    for _ in range(_ATTEMPTS):
        descriptor: int = _syscall()(
            ctypes.c_long(_OPENAT2),
            ctypes.c_int(folder),
            ctypes.c_char_p(os.fsencode(path)),
            ctypes.byref(how),
            ctypes.c_size_t(ctypes.sizeof(how)),
        )
        if descriptor >= 0:
            return descriptor
        if ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR):
            break
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)


def _step_by_step(folder: int, path: str, flags: int) -> int:
    *parents, name = path.split("/")
    if ".." in (*parents, name) or path.startswith("/"):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)
    here = os.dup(folder)
    try:
        for parent in parents:
            below = _opened_here(here, parent, os.O_PATH | os.O_CLOEXEC, path)
            os.close(here)
            here = below
        return _opened_here(here, name, flags, path)
    finally:
        os.close(here)


def _opened_here(folder: int, name: str, flags: int, path: str) -> int:
    if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
    descriptor = os.open(name, flags | os.O_NOFOLLOW, dir_fd=folder)
    if stat.S_ISLNK(os.fstat(descriptor).st_mode):  # O_PATH opens the link itself
        os.close(descriptor)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
    return descriptor


@functools.cache
def _has_openat2() -> bool:
    root = os.open("/", _FOLDER)
    try:
        os.close(_at_once(root, ".", _FOLDER))
    except OSError:  # ENOSYS, or what a sandbox answers to calls that it does not know
        return False
    finally:
        os.close(root)
    return True


@functools.cache
def _syscall() -> "ctypes._NamedFuncPointer":
    function = ctypes.CDLL(None, use_errno=True).syscall
    function.restype = ctypes.c_long
    return function
