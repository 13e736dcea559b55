# SPDX-License-Identifier: Apache-2.0
"""NCCL's broadcast through ctypes: communicators that never block their caller and that can be given up at any time.

Not torch's process groups: their watchdog ends the process when the other side fails. Nothing is loaded at import.
"""

import contextlib
import ctypes
import functools
import os
import sys
from pathlib import Path
from typing import Any

ID_BYTES = 128
_SUCCESS, _IN_PROGRESS = 0, 7
_UINT8, _FLOAT32, _SUM = 1, 7, 0
_UNDEFINED = -(1 << 31)
"""Values of ncclResult_t, ncclDataType_t and ncclRedOp_t, and NCCL_CONFIG_UNDEF_INT (nccl.h)."""


class NcclError(RuntimeError):
    """NCCL refused or failed; or it is not there."""


class _Id(ctypes.Structure):
    """An ncclUniqueId."""

    _fields_ = (("internal", ctypes.c_char * ID_BYTES),)


class _Config(ctypes.Structure):
    """An ncclConfig_t as of NCCL 2.14, which every later version takes: what came after it has defaults. The last field fills
    what is padding there, and is `cgaClusterSize` from 2.17 on."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cluster", ctypes.c_int),
    )


def unique_id() -> bytes:
    """Make the id by which the ranks of a new communicator find each other.

    The caller's process listens for them from now on.
    """
    unique_id = _Id()
    _call("ncclGetUniqueId", ctypes.byref(unique_id))
    return ctypes.string_at(ctypes.byref(unique_id), ID_BYTES)


class Communicator:
    """One rank of a communicator, on the current device. Not for several threads at once.

    Made at once; no call is allowed but `ready` and `abort` until `ready()`, and so after each
    `broadcast` and `all_reduce`.
    """

    def __init__(self, id: bytes, size: int, rank: int) -> None:
        if len(id) != ID_BYTES:
            raise ValueError(f"expected an id of {ID_BYTES} bytes, found {len(id)}")
        self._handle = ctypes.c_void_p()
        config = _Config(ctypes.sizeof(_Config), 0xCAFEBEEF, 21400, 0, _UNDEFINED)
        unique = _Id.from_buffer_copy(id)
        _call("ncclCommInitRankConfig", ctypes.byref(self._handle), size, unique, rank, ctypes.byref(config))

    def ready(self) -> bool:
        """Tell whether the communicator, or the launch of a broadcast, is done on this side.

        Raises:
            NcclError: it failed, or another rank has.
        """
        state = ctypes.c_int()
        _call("ncclCommGetAsyncError", self._handle, ctypes.byref(state))
        _require("ncclCommGetAsyncError", state.value)
        return state.value == _SUCCESS

    def broadcast(self, address: int, size: int, stream: int) -> None:
        """Queue the broadcast of `size` bytes at rank 0's `address` to the others'.

        `stream`: a CUDA stream.
        """
        pointer = ctypes.c_void_p(address)
        _call("ncclBroadcast", pointer, pointer, size, _UINT8, 0, self._handle, ctypes.c_void_p(stream))

    def all_reduce(self, address: int, count: int, stream: int) -> None:
        """Queue a sum over all ranks, in place: of `count` fp32 numbers at `address`, on a CUDA stream."""
        pointer = ctypes.c_void_p(address)
        stream_pointer = ctypes.c_void_p(stream)
        _call("ncclAllReduce", pointer, pointer, count, _FLOAT32, _SUM, self._handle, stream_pointer)

    def abort(self) -> None:
        """Leave, whatever the other ranks do; a broadcast under way ends unfinished. Idempotent."""
        handle, self._handle = self._handle, ctypes.c_void_p()
        if handle:
            with contextlib.suppress(NcclError):  # there is nothing else that could be done
                _call("ncclCommAbort", handle)


def _call(function: str, *arguments: Any) -> None:
    _require(function, getattr(_library(), function)(*arguments))


def _require(function: str, status: int) -> None:
    if status not in (_SUCCESS, _IN_PROGRESS):
        library = _library()
        texts = library.ncclGetErrorString(status), library.ncclGetLastError(None)
        message = ": ".join(text.decode(errors="replace").strip() for text in texts if text)
        raise NcclError(f"{function}: {message} ({status})")


@functools.cache
def _library() -> ctypes.CDLL:
    """Open the NCCL that this process has loaded, else torch's, else the system's."""
    name = "libnccl.so.2"
    library = None
    with contextlib.suppress(OSError):
        library = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    for path in (Path(entry) / "nvidia/nccl/lib" / name for entry in sys.path):
        if library is None and path.is_file():
            library = ctypes.CDLL(str(path))
    try:
        library = library or ctypes.CDLL(name)
    except OSError as error:
        raise NcclError(f"found no NCCL: {error}") from None
    pointer, integer, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
    for function, types in {
        "ncclGetUniqueId": [pointer],
        "ncclCommInitRankConfig": [pointer, integer, _Id, integer, pointer],
        "ncclCommGetAsyncError": [pointer, pointer],
        "ncclBroadcast": [pointer, pointer, size, integer, integer, pointer, pointer],
        "ncclAllReduce": [pointer, pointer, size, integer, integer, pointer, pointer],
        "ncclCommAbort": [pointer],
        "ncclGetErrorString": [integer],
        "ncclGetLastError": [pointer],
    }.items():
        getattr(library, function).argtypes = types
    library.ncclGetErrorString.restype = library.ncclGetLastError.restype = ctypes.c_char_p
    return library
